"""The HTTP interface of `adcascade gateway` and `adcascade serve`: requests, answers, limits, keys, its description.

Everything here is on one seam, `AdService`. What decides about ads is behind it, on Kafka or in this process.
"""
