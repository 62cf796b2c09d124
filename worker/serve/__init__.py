"""`adcascade serve`: real traffic over HTTP on one machine, without Kafka, durable in a state folder.

One process serves; a second one learns and keeps the folder (`learner`). The rules are in `worker.stream`.
"""
