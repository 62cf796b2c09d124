"""adcascade: a streaming ad-serving worker for sessions that show several ads in a row."""

from worker import kernels

__version__ = "0.3.0"

kernels.pin()
kernels.hold()
