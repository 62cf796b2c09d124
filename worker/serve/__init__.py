"""`adcascade serve`: real traffic over HTTP on one machine, without Kafka, durable in a state folder.

One process serves and is the only writer of the folder; a second one learns (`learner`).
The rules are in `worker.stream`.
"""
