"""The worker on Kafka: a Faust app (`app.py`), its driver on librdkafka (`driver.py`, `thread.py`), and the learner.

Commands, the learner process and `worker.client` use librdkafka without Faust (`clients.py`).
"""
