"""What the worker on Kafka and `adcascade serve` share: processes and their supervision, clocks, memory, checks."""
