"""The live view of demo and traffic: a panel on a terminal, a few lines in a pipe."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from worker.simulation.demo.report import DemoView
from worker.simulation.demo.run import Beside, Demo, DemoSettings, additive
from worker.simulation.reporting import Source, live_view, sparkline, trends
from worker.simulation.worth import Worth


@pytest.fixture(scope="module")
def demo() -> Demo:
    running = Demo(DemoSettings(users=20, episodes=4))
    while len(running.rows) < 2:
        running.step()
    return running


def drawn(source: Source, width: int = 100) -> list[str]:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(source.panel(12.0))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


DEMO_WORDS = ("explored", "v2", "dead letters", "best ads", "episode 2/4", "Ctrl-C")


@pytest.mark.parametrize("width", [80, 160])
def test_the_panel_fits_the_terminal_and_shows_the_figures(demo, width):
    lines = drawn(DemoView(demo, "http://here"), width)
    text = "\n".join(lines)
    assert max(len(line.rstrip()) for line in lines) <= width - 2
    assert len(lines) <= 24
    for word in (*DEMO_WORDS, "sessions", "decisions", "oracle", "pseudo-regret/session", "in 12 s"):
        assert word in text


def test_runs_without_figures_can_be_drawn():
    assert "–" in "\n".join(drawn(DemoView(Demo(DemoSettings(users=5, episodes=2)), "http://here")))


def test_on_a_terminal_panels_are_drawn_and_leave_nothing_behind(demo, monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setattr("worker.simulation.reporting.REFRESH", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    with live_view(DemoView(demo, "http://here")) as show:
        show()
    written = capsys.readouterr().err
    assert "adcascade demo" in written
    assert written.endswith("\x1b[2K")  # the last of its lines is wiped


def test_without_a_terminal_or_without_rich_a_demo_prints_its_addresses_and_a_line_per_quarter(capsys, monkeypatch):
    demo = Demo(DemoSettings(users=5, episodes=3))
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with live_view(DemoView(demo, "http://here")) as show:
        while not demo.finished:
            demo.step()
            show()
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["metrics: http://here/metrics", "status page: http://here/"]
    assert [line[:4] for line in lines[2:]] == [" 25%", " 50%", " 75%"]


def test_a_trend_has_at_most_its_width_and_reaches_as_high_as_its_values():
    assert sparkline([], 0.0, 1.0) == ""
    assert sparkline([1.0] * 100 + [0.0] * 100, 0.0, 1.0, width=4) == "██▁▁"


def test_the_run_beside_is_drawn_on_the_same_scale(demo) -> None:
    other = additive(demo.settings)
    assert other is not None
    beside = Beside(other)
    beside.rows = list(demo.rows)
    text = "\n".join(drawn(DemoView(demo, "http://here", beside)))
    assert "personal: served/oracle" in text
    assert "additive: served/oracle" in text
    better, worse = (Worth(sessions=1, oracle=1.0, served=served) for served in (0.95, 0.5))
    assert [scale for _, _, scale, _ in trends(("a", [better]), ("b", [worse]))] == [(0.5, 1.0)] * 2
