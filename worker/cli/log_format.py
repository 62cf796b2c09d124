"""The log of a worker: one JSON object per line for machines, or plain lines for people."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, TextIO

import orjson

from worker.errors import AdcascadeError

FORMATS = ("json", "text")
LEVELS = ("debug", "info", "warning", "error")
HIDDEN = "…"

# At INFO, faust logs tables at every rebalance, and mode warns of every late timer, as on any busy machine: shown at
# DEBUG only.
_LIBRARY_LEVELS = {"faust": "WARNING", "mode": "ERROR"}


class _NoServices(logging.Filter):
    """Drop the messages of mode when one of its services starts or stops, or ends for a reason that is logged."""

    def filter(self, record: logging.LogRecord) -> bool:
        message = str(record.msg)
        if not message.startswith("[^"):
            return True
        logged = "Reraising original exception" in message or (
            isinstance(record.args, tuple) and any(isinstance(one, AdcascadeError) for one in record.args)
        )
        return record.levelno > logging.INFO and not logged


class JsonLines(logging.Formatter):
    """Format a record as one object: time, level, logger, message, error, and the fields of `extra={"fields": …}`.

    >>> line = JsonLines().format(logging.makeLogRecord({"msg": "up", "levelname": "INFO", "name": "w", "created": 0}))
    >>> line
    '{"time":"1970-01-01T00:00:00.000Z","level":"info","logger":"w","message":"up"}'
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        time = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, Any] = {
            "time": f"{time:%Y-%m-%dT%H:%M:%S}.{time.microsecond // 1000:03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str).decode()


class _Handler(logging.StreamHandler[TextIO]):
    """Remove secrets from all lines: no message here has one, but a library may quote its arguments in an error."""

    def __init__(self, stream: TextIO, secrets: Iterable[str]) -> None:
        super().__init__(stream)
        # Also in their JSON form: a secret may contain quotes.
        self._secrets = [form for secret in secrets if secret for form in (secret, orjson.dumps(secret).decode()[1:-1])]

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        for secret in self._secrets:
            line = line.replace(secret, HIDDEN)
        return line


def configure(
    *, format: str | None, level: str = "info", secrets: Iterable[str] = (), stream: TextIO | None = None
) -> None:
    """Send all logs to standard error; without a format, text on a terminal and JSON elsewhere."""
    stream = stream or sys.stderr
    chosen = format or ("text" if stream.isatty() else "json")
    handler = _Handler(stream, secrets)
    text = logging.Formatter("%(asctime)s %(levelname)-7s %(message)s", datefmt="%H:%M:%S")
    handler.setFormatter(JsonLines() if chosen == "json" else text)
    if level != "debug":
        handler.addFilter(_NoServices())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name, least in _LIBRARY_LEVELS.items():
        logging.getLogger(name).setLevel("DEBUG" if level == "debug" else least)
    logging.captureWarnings(True)
