"""Faust and nothing else: the app, the transport driver, the session store, checks of pinned versions.

Faust keeps group membership, assignment, recovery and lifecycle; decisions are made outside of this package.
"""
