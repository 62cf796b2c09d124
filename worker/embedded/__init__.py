"""The whole topology in one process without a broker, and the folder that keeps its state.

The caller supplies the time; the rules are in `worker.stream`.
"""
