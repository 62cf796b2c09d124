"""adcascade: a streaming ad-serving worker for sessions that show several ads in a row."""

__version__ = "0.1.0"
