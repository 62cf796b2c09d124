"""`adcascade traffic`: simulated users in real time against Kafka, their accounts and metrics.

Only `client` sends and receives: the generator accepts decisions and returns records as bytes.
"""
