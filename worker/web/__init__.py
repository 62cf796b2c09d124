"""The HTTP server of a worker: /metrics, the health checks and the status page.

It reads snapshots of the metrics and changes nothing.
"""
