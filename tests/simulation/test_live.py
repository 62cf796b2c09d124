"""The live view of demo and traffic: pictures on a terminal, a few lines in a pipe."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from worker.simulation.demo.beside import Beside
from worker.simulation.demo.run import Demo, DemoSettings, additive
from worker.simulation.demo.view import DemoView
from worker.simulation.live import PlainView, RichView, Source, Speed, area, live_view, picture
from worker.simulation.traffic.generator import Traffic, TrafficSettings
from worker.simulation.traffic.view import LINE_EVERY, TrafficView
from worker.simulation.worth import Worth

START = 10**18


@pytest.fixture(scope="module")
def demo() -> Demo:
    running = Demo(DemoSettings(users=20, episodes=4))
    while len(running.rows) < 2:
        running.step()
    return running


@pytest.fixture
def traffic() -> Traffic:
    running = Traffic(TrafficSettings(rate=None, sessions=2_000, waiting=200, poison=0, duplicates=0), now=START)
    running.due(START)
    running.history.add(0, Worth(sessions=3, oracle=2.0, served=1.0))
    return running


def drawn(source: Source, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(picture(source.frame(12.0), width))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


DEMO_WORDS = ("click rate", "exploring", "version 2", "open sessions", "dead letters", "episode 2/4", "Ctrl-C")
TRAFFIC_WORDS = ("records", "decision p99", "flat out", "wait for a decision", "50.0%", "0.33333", "here/metrics")


@pytest.mark.parametrize("width", [72, 80, 100, 160])
@pytest.mark.parametrize("name", ["demo", "traffic"])
def test_the_picture_fits_the_terminal_and_shows_the_figures(demo, traffic, name, width):
    source: Source = DemoView(demo, "http://here") if name == "demo" else TrafficView(traffic, "http://here")
    source.frame(11.0)
    lines = drawn(source, width)
    text = "\n".join(lines)
    assert max(map(len, lines)) <= width - 2
    assert len(lines) <= 24
    for word in ("sessions", "decisions", "(0/s)", "oracle", "pseudo-regret/session", "in 12 s"):
        assert word in text
    for word in DEMO_WORDS if name == "demo" else TRAFFIC_WORDS:
        assert word in text


def test_runs_without_figures_can_be_drawn():
    assert "–" in "\n".join(drawn(DemoView(Demo(DemoSettings(users=5, episodes=2)), "http://here"), 100))
    assert "–" in "\n".join(drawn(TrafficView(Traffic(TrafficSettings(), now=START), "http://here"), 100))


def test_a_view_draws_and_leaves_nothing_behind(demo):
    console = Console(file=io.StringIO(), width=90, force_terminal=True)
    with RichView(DemoView(demo, "http://here"), console) as view:
        view._drawn = float("-inf")
        view.show()
    assert isinstance(console.file, io.StringIO)
    assert "adcascade demo" in console.file.getvalue()
    assert console.file.getvalue().endswith("\x1b[2K")  # the last of its lines is wiped


def test_a_demo_in_a_pipe_prints_its_addresses_and_a_line_per_quarter(capsys):
    demo = Demo(DemoSettings(users=5, episodes=3))
    with PlainView(DemoView(demo, "http://here")) as view:
        while not demo.finished:
            demo.step()
            view.show()
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["metrics: http://here/metrics", "status page: http://here/"]
    assert [line[:4] for line in lines[2:]] == [" 25%", " 50%", " 75%"]


def test_traffic_in_a_pipe_prints_its_address_and_a_line_every_few_seconds(traffic):
    source = TrafficView(traffic, "http://here")
    assert source.opening == ("metrics: http://here/metrics",)
    lines = [source.line(seconds) for seconds in (0.0, LINE_EVERY - 1, LINE_EVERY, LINE_EVERY + 1)]
    assert lines[:2] == [None, None] == [*lines[3:], None]
    assert lines[2] is not None
    assert lines[2].startswith(f"  10 s  {traffic.counts.sessions} sessions, {traffic.counts.events} records (")
    assert lines[2].endswith("decisions in – (p99 –), lately 50.0% of the oracle's revenue")


def test_pictures_need_a_terminal_and_rich(demo, monkeypatch):
    source = DemoView(demo, "http://here")
    assert isinstance(live_view(source), PlainView)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert isinstance(live_view(source), RichView)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert isinstance(live_view(source), PlainView)


def test_a_rate_covers_only_the_last_looks():
    speed = Speed(looks=2)
    looks = ((0.0, 0), (1.0, 1000), (2.0, 1000), (3.0, 1000))
    assert [speed.at(now, count) for now, count in looks] == [0, 1000, 500, 0]


@given(
    values=st.lists(st.floats(0, 1), max_size=30),
    total=st.integers(1, 40),
    width=st.integers(1, 20),
    height=st.integers(1, 5),
)
def test_an_area_has_its_size_and_only_braille(values, total, width, height):
    lines = area(values, total=total, width=width, height=height, low=0.0, high=1.0)
    assert [len(line) for line in lines] == [width] * height
    assert all(0x2800 <= ord(cell) < 0x2900 for line in lines for cell in line)


def test_an_area_reaches_as_high_as_its_values_and_as_far_as_they_go():
    assert area([1.0, 1.0], total=4, width=2, height=2, low=0.0, high=1.0) == ["⣿⠀", "⣿⠀"]
    assert area([0.0] * 4, total=4, width=2, height=2, low=0.0, high=1.0) == ["⠀⠀", "⣀⣀"]
    assert area([0.0, 0.0, 1.0, 1.0], total=4, width=2, height=1, low=0.0, high=1.0) == ["⣀⣿"]


def test_the_run_beside_is_drawn_on_the_same_scale() -> None:
    settings = DemoSettings(users=20, episodes=3)
    other = additive(settings)
    assert other is not None
    demo, same = Demo(settings), Demo(other)
    while not demo.finished:
        demo.step()
        same.step()
    beside = Beside(settings=other, rows=list(same.rows), sha256=same.parameters.sha256)
    frame = DemoView(demo, "http://here", beside).frame(1.0)
    left, right = frame.curves
    assert (left.title, right.title) == ("personal: served/oracle", "additive: served/oracle")
    assert (left.low, left.high) == (right.low, right.high)
    assert right.values == [row.score.share for row in beside.rows]
    assert "additive: served/oracle" in "\n".join(drawn(DemoView(demo, "http://here", beside), 100))
