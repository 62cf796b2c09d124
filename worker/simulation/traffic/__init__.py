"""`adcascade traffic`: simulated users in real time against Kafka, their accounts, metrics and live view.

Only `client` sends and receives: the generator accepts decisions and returns records as bytes.
"""
