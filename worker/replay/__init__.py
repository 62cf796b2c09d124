"""Replay of a recorded log: decisions planned again, versions folded again, learning repeated from raw events.

Reads logs only; reports differences and changes nothing.
"""
