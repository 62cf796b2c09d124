"""`adcascade bench kafka`: the worker against raw aiokafka and an idiomatic Faust agent on one broker.

Here: the broker, recorded traffic, child processes, a live client, and a soak test. The worker itself runs as a
command.
"""
