"""The whole topology in one process without a broker, in memory.

The caller supplies the time; the rules are in `worker.stream`.
"""
