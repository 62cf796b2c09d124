"""Recorded topics: the log format, recording from Kafka, the ordered log, the one reader of session traces, and tables.

Reads and writes logs. Comparison and learning belong to `replay` and `evaluate`.
"""
