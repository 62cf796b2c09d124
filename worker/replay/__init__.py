"""Replay of a recorded log: `verify` plans decisions and folds versions again, `relearn` learns from raw events.

Reads logs only. Reports differences and changes nothing.
"""
