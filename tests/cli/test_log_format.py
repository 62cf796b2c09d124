"""The logs of a worker: one object per line, nothing secret."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from worker.cli.log_format import FORMATS, HIDDEN, configure
from worker.errors import FailedError


@pytest.fixture(autouse=True)
def untouched_logging() -> Iterator[None]:
    """Put the root logger back as pytest has it."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)


def test_a_line_is_an_object_with_fields_and_the_error() -> None:
    stream = io.StringIO()
    configure(format="json", stream=stream)
    logger = logging.getLogger("worker.test")
    logger.info("up at %s", "noon", extra={"fields": {"port": 7}})
    try:
        raise ValueError("broken\nin two")
    except ValueError:
        logger.exception("it failed")
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert (first["level"], first["message"], first["port"]) == ("info", "up at noon", 7)
    assert "ValueError: broken" in second["error"]


@pytest.mark.parametrize("format", FORMATS)
def test_a_secret_in_a_message_or_an_error_is_removed(format: str) -> None:
    stream = io.StringIO()
    configure(format=format, stream=stream, secrets=["hush-hush", 'so "quiet" \\ so', ""])
    try:
        raise ValueError("login failed for me:hush-hush")
    except ValueError:
        logging.getLogger("any").exception("tried %s and %s", "hush-hush", 'so "quiet" \\ so')
    assert "hush-hush" not in stream.getvalue()
    assert "quiet" not in stream.getvalue()
    assert stream.getvalue().count(HIDDEN) >= 3


NOT_YET = "Group Coordinator Request failed: [Error 15] GroupCoordinatorNotAvailableError"
REBALANCING = "Heartbeat failed for group ads because it is rebalancing"


def shown(times: list[tuple[float, str]], level: str = "info") -> list[tuple[float, str, str]]:
    """Log errors of aiokafka at given times, and return time, level and message of the lines."""
    stream = io.StringIO()
    configure(format="json", level=level, stream=stream)
    for time, message in times:
        fields = {"name": "aiokafka.consumer", "levelno": logging.ERROR, "levelname": "ERROR", "msg": message}
        logging.getLogger().handle(logging.makeLogRecord({**fields, "created": time}))
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    return [(float(line["time"][-7:-1]), line["level"], line["message"]) for line in lines]


@pytest.mark.parametrize("message", [NOT_YET, REBALANCING, "Marking the coordinator dead (node 1)for group ads."])
def test_what_passes_by_itself_at_a_first_start_is_one_line_of_information(message: str) -> None:
    lines = shown([(time / 10, message) for time in range(100)])
    assert [(time, level) for time, level, _ in lines] == [(0.0, "info")]
    assert "Error 15" not in lines[0][2]
    assert shown([(0.0, message)], level="warning") == []


def test_if_it_does_not_pass_it_is_a_warning_once_a_minute() -> None:
    lines = shown([(float(time), NOT_YET) for time in range(60)])
    assert [(time, level) for time, level, _ in lines] == [(0.0, "info"), (30.0, "warning")]
    assert NOT_YET in lines[1][2]
    assert "for 30 s now" in lines[1][2]
    assert len(shown([(float(time), NOT_YET) for time in range(200)], level="warning")) == 3


def test_it_begins_anew_after_a_pause_and_other_errors_are_shown_as_they_are() -> None:
    other = "Group Coordinator Request failed: [Error 30] not authorized"
    lines = shown([(0.0, NOT_YET), (1.0, NOT_YET), (40.0, NOT_YET), (41.0, REBALANCING), (42.0, other), (53.0, other)])
    assert [level for _, level, _ in lines] == ["info", "info", "info", "error", "error"]


def test_a_broker_that_is_down_fills_no_log() -> None:
    lines = shown([(time / 10, "Unable connect to node with id 1") for time in range(250)])
    assert [(time, level) for time, level, _ in lines] == [(0.0, "error"), (10.0, "error"), (20.0, "error")]
    assert lines[1][2] == "Unable connect to node with id 1 (and 99 more like it)"


def test_without_a_format_a_pipe_gets_json_and_a_terminal_text() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    pipe, terminal = io.StringIO(), Terminal()
    for stream in (pipe, terminal):
        configure(format=None, stream=stream)
        logging.getLogger("any").warning("look")
    assert json.loads(pipe.getvalue())["message"] == "look"
    assert terminal.getvalue().endswith("WARNING look\n")


def test_libraries_log_warnings_only_and_services_nothing() -> None:
    stream = io.StringIO()
    configure(format="json", stream=stream)
    logging.getLogger("faust.app").info("tables")
    logging.getLogger("worker.kafka.worker").info("[^--Watch]: Starting...")
    logging.getLogger("aiokafka").warning("connection lost")
    assert [json.loads(line)["message"] for line in stream.getvalue().splitlines()] == ["connection lost"]


def test_an_end_on_purpose_is_one_line_and_a_defect_keeps_its_own() -> None:
    stream = io.StringIO()
    configure(format="text", stream=stream)
    faust = logging.getLogger("faust.app.base")
    logging.getLogger("worker").critical("the worker ends: %s", FailedError("--dim is 5"))
    faust.error("[^-WorkerApp]: Crashed reason=%r", FailedError("--dim is 5"))
    faust.critical("[^_FaustProcess]: We experienced a crash! Reraising original exception...")
    faust.error("[^-WorkerApp]: Crashed reason=%r", KeyError("unexpected"))
    ended, crashed = stream.getvalue().splitlines()
    assert ended.endswith("the worker ends: --dim is 5")
    assert "KeyError('unexpected')" in crashed
