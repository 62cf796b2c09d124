"""The whole topology in one process without a broker, and the folder that keeps its state.

The caller supplies the time; decisions are made in `worker.stream`.
"""
