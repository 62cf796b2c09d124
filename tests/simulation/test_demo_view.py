"""The live view of the demo: a panel on a terminal, a few lines in a pipe."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from worker.simulation.demo import view
from worker.simulation.demo.run import Demo, DemoSettings
from worker.simulation.demo.view import live_view, panel, sparkline


@pytest.fixture(scope="module")
def demo() -> Demo:
    running = Demo(DemoSettings(users=20, episodes=4))
    while len(running.rows) < 2:
        running.step()
    return running


def drawn(demo: Demo, width: int = 100) -> list[str]:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(panel(demo, "http://here", 12.0))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [80, 160])
def test_the_panel_fits_the_terminal_and_shows_the_figures(demo, width):
    lines = drawn(demo, width)
    text = "\n".join(lines)
    assert max(len(line.rstrip()) for line in lines) <= width - 2
    assert len(lines) <= 24
    figures = ("sessions", "decisions", "oracle", "explored", "v2", "dead letters", "best ads", "served/oracle")
    for word in (*figures, "episode 2/4", "in 12 s", "Ctrl-C"):
        assert word in text


def test_a_run_without_figures_can_be_drawn():
    assert "–" in "\n".join(drawn(Demo(DemoSettings(users=5, episodes=2))))


def test_on_a_terminal_panels_are_drawn_and_leave_nothing_behind(demo, monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setattr(view, "REFRESH", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    with live_view(demo, "http://here") as show:
        show()
    written = capsys.readouterr().err
    assert "adcascade demo" in written
    assert written.endswith("\x1b[2K")  # the last of its lines is wiped


def test_without_a_terminal_or_without_rich_a_demo_prints_its_addresses_and_a_line_per_quarter(capsys, monkeypatch):
    demo = Demo(DemoSettings(users=5, episodes=3))
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with live_view(demo, "http://here") as show:
        while not demo.finished:
            demo.step()
            show()
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["metrics: http://here/metrics", "status page: http://here/"]
    assert [line[:4] for line in lines[2:]] == [" 25%", " 50%", " 75%"]


def test_a_trend_has_at_most_its_width_and_reaches_as_high_as_its_values():
    assert sparkline([], 0.0, 1.0) == ""
    assert sparkline([1.0] * 100 + [0.0] * 100, 0.0, 1.0, width=4) == "██▁▁"
