"""Recorded topics: the log format, recording from Kafka, the ordered log, and the one reader of session traces.

Reads and writes logs. Comparison and learning belong to `replay` and `evaluate`.
"""
