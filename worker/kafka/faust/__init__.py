"""The transport on Faust, and nothing else: app, transport driver, session store, checks of pinned versions.

Faust keeps group membership, assignment, recovery and life cycle. Only this package imports Faust and mode.
"""
