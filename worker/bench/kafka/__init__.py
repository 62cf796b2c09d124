"""`adcascade bench kafka`: the worker against raw aiokafka and an idiomatic Faust agent on one broker.

Recorded traffic, child processes, a live client, and a soak test.
"""
