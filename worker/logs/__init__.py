"""Recorded topics: the log format, recording from Kafka, and one reader that puts records in order.

Reads and writes logs; comparing and learning from them is left to `replay` and `evaluate`.
"""
