"""The log of a worker: one JSON object per line for machines, or plain lines for people."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TextIO

import orjson

from worker.errors import AdcascadeError

FORMATS = ("json", "text")
LEVELS = ("debug", "info", "warning", "error")
HIDDEN = "…"

# At INFO, faust and aiokafka log tables at every rebalance, and mode warns of every late timer, as on any busy machine.
# All of it is shown at DEBUG only.
_LIBRARY_LEVELS = {"faust": "WARNING", "aiokafka": "WARNING", "mode": "ERROR"}


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


#: Messages of aiokafka at a first start or a change of the group, by a part of them, and their meanings.
_PASSING = {
    "Group Coordinator Request failed: [Error 15]": "the broker prepares its consumer groups; trying again",
    "Marking the coordinator dead": "the broker that coordinates the group has changed; looking for the new one",
    "because it is rebalancing": "a worker joins or leaves: the group is rebalancing",
}
#: Seconds after which these messages are no longer normal, and seconds between two warnings then.
PERSISTS, BETWEEN_WARNINGS = 30.0, 60.0


@dataclass(slots=True)
class _Series:
    """Messages of a kind, each within `PERSISTS` of the one before: the first, the last, the last shown."""

    first: float
    last: float
    shown: float


class PassingTrouble(logging.Filter):
    """Show what passes by itself once, as information; if it does not pass, as a warning from time to time.

    `least` is the lowest level that is shown.
    """

    def __init__(self, least: int) -> None:
        super().__init__()
        self._least = least
        self._series: dict[str, _Series] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Change or drop a record that may pass by itself."""
        if not record.name.startswith("aiokafka"):
            return True
        message = record.getMessage()
        meaning = next((text for part, text in _PASSING.items() if part in message), None)
        if meaning is None:
            return True
        now, series = record.created, self._series.get(meaning)
        if series is None or now - series.last > PERSISTS:
            self._series[meaning] = _Series(now, now, now)
            return self._change(record, logging.INFO, meaning)
        series.last, lasting = now, now - series.first
        if lasting < PERSISTS or (series.shown > series.first and now - series.shown < BETWEEN_WARNINGS):
            return False
        series.shown = now
        return self._change(record, logging.WARNING, f"{message}; for {lasting:.0f} s now ({meaning})")

    def _change(self, record: logging.LogRecord, level: int, message: str) -> bool:
        record.levelno, record.levelname, record.msg, record.args = level, logging.getLevelName(level), message, ()
        return level >= self._least


#: Seconds between two lines of the same kind from aiokafka.
BETWEEN_REPEATS = 10.0


class Repeated(logging.Filter):
    """Show each kind of message of aiokafka every few seconds only, with the number of those left out.

    While no broker answers, each of its clients logs many times a second that it cannot connect.
    """

    def __init__(self) -> None:
        super().__init__()
        self._shown: dict[tuple[str, str], tuple[float, int]] = {}  # when the last was shown, and how many came since

    def filter(self, record: logging.LogRecord) -> bool:
        """Drop a record if one of its kind was shown a moment ago."""
        if not record.name.startswith("aiokafka"):
            return True
        kind = record.name, str(record.msg)[:40]
        last, more = self._shown.get(kind, (-BETWEEN_REPEATS, 0))
        if record.created < last + BETWEEN_REPEATS:
            self._shown[kind] = last, more + 1
            return False
        self._shown[kind] = record.created, 0
        if more:
            record.msg, record.args = f"{record.getMessage()} (and {more:,} more like it)", ()
        return True


class JsonLines(logging.Formatter):
    """Format a record as one object: time, level, logger, message, error, and the fields of `extra={"fields": …}`.

    >>> line = JsonLines().format(logging.makeLogRecord({"msg": "up", "levelname": "INFO", "name": "w", "created": 0}))
    >>> line
    '{"time":"1970-01-01T00:00:00.000Z","level":"info","logger":"w","message":"up"}'
    """

    def __init__(self, secrets: Sequence[str] = ()) -> None:
        super().__init__()
        # Also in their JSON form: a secret may contain quotes.
        self._secrets = [*secrets, *(orjson.dumps(secret).decode()[1:-1] for secret in secrets)]

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
        return _without(orjson.dumps(line, default=str).decode(), self._secrets)


class TextLines(logging.Formatter):
    """Format a record as a line of text."""

    def __init__(self, secrets: Sequence[str] = ()) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s", datefmt="%H:%M:%S")
        self._secrets = secrets

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, followed by the traceback of an error."""
        return _without(super().format(record), self._secrets)


def _without(text: str, secrets: Sequence[str]) -> str:
    """Remove secrets: no message here has one, but a library may quote its arguments in an error."""
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    return text


def configure(
    *, format: str | None, level: str = "info", secrets: Sequence[str] = (), stream: TextIO | None = None
) -> None:
    """Send all logs to standard error; without a format, text on a terminal and JSON elsewhere."""
    stream = stream or sys.stderr
    chosen = format or ("text" if stream.isatty() else "json")
    handler = logging.StreamHandler(stream)
    shown = [secret for secret in secrets if secret]
    handler.setFormatter(JsonLines(shown) if chosen == "json" else TextLines(shown))
    if level != "debug":
        handler.addFilter(_NoServices())
        handler.addFilter(PassingTrouble(logging.getLevelNamesMapping()[level.upper()]))
        handler.addFilter(Repeated())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name, least in _LIBRARY_LEVELS.items():
        logging.getLogger(name).setLevel("DEBUG" if level == "debug" else least)
    logging.captureWarnings(True)
