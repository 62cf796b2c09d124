"""`adcascade bench kafka`: the worker, plain echoes and an idiomatic Faust agent on one broker.

Here: the broker, topics, child processes, and the client that sends arrivals and reads decisions. The worker itself
runs as a command.
"""
