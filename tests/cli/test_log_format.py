"""The logs of a worker: one object per line, nothing secret."""

from __future__ import annotations

import io
import json
import logging

import pytest

from tests.cli.conftest import Terminal
from worker.cli.log_format import FORMATS, HIDDEN, configure
from worker.errors import FailedError


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


def test_without_a_format_a_pipe_gets_json_and_a_terminal_text() -> None:
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
    logging.getLogger("faust.transport").warning("connection lost")
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
