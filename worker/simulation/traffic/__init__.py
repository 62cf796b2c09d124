"""Simulated users in real time, for `adcascade traffic`: generator, accounts, metrics, live view.

Knows no broker: records go out and decisions come in as bytes.
"""
