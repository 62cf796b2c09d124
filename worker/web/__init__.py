"""The HTTP server beside the work: /metrics, /livez, /readyz and the status page.

Serves what it is given; reads the metrics and never changes them.
"""
