"""The worker on Kafka, apart from Faust: connection, topics, clients, pipelines, writers, the learner process.

`transport.py` is the seam: what the worker needs of Kafka. Only `kafka/faust/` imports Faust.
"""
