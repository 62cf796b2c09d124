"""Progress on a terminal, and nothing elsewhere."""

from __future__ import annotations

import pytest

from tests.cli.conftest import Terminal
from worker import console


def test_progress_is_a_line_on_a_terminal_that_is_removed_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "_BETWEEN_LINES", -1.0)
    monkeypatch.setattr("sys.stderr", shown := Terminal())
    with console.progress("reading log", 2_000, unit="lines") as bar:
        bar.advance(500)
        bar.describe("reading more")
    lines = shown.getvalue().split("\r")[1:]
    assert lines == ["reading log: 500 lines (25%)\x1b[K", "reading more: 500 lines (25%)\x1b[K", "\x1b[K"]


def test_a_pipe_gets_no_progress(capsys: pytest.CaptureFixture[str]) -> None:
    with console.progress("reading log", None) as bar:
        bar.advance()
        bar.describe("reading more")
    assert capsys.readouterr().err == ""
