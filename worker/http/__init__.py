"""The HTTP server, and the interface of `adcascade gateway` and `adcascade serve`: requests, limits, keys, description.

Requests for ads are on one seam, `AdService`. What decides about ads is behind it, on Kafka or in this process.
"""
