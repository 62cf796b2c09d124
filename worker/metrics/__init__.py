"""Metrics of a worker: the catalogue, the observer that sums them, and the recent history for the status page.

`Metrics` observes what the runners emit. Prometheus and the status page both read its `snapshot`, never its state.
No HTTP here, and nothing that changes a decision.
"""
