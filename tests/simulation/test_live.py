"""The live view: what it draws, and that it says little where nothing can move."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from worker.simulation.demo.run import Demo, DemoSettings
from worker.simulation.live import PlainView, RichView, Speed, area, picture


@pytest.fixture(scope="module")
def demo() -> Demo:
    running = Demo(DemoSettings(users=20, episodes=4))
    while len(running.rows) < 2:
        running.step()
    return running


def drawn(demo: Demo, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(picture(demo, "http://127.0.0.1:1", 12.0, 345.0, width))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [72, 80, 100, 160])
def test_the_picture_fits_the_terminal_and_shows_what_matters(demo, width):
    lines = drawn(demo, width)
    text = "\n".join(lines)
    assert max(map(len, lines)) <= width - 2
    assert len(lines) <= 24
    for word in ("sessions", "decisions", "345/s", "click rate", "oracle", "exploring", "version 2", "open sessions"):
        assert word in text
    assert "pseudo-regret/session" in text
    assert "dead letters" in text


def test_a_demo_that_has_not_begun_can_be_drawn():
    assert "–" in "\n".join(drawn(Demo(DemoSettings(users=5, episodes=2)), 100))


def test_a_view_draws_and_leaves_nothing_behind(demo):
    console = Console(file=io.StringIO(), width=90, force_terminal=True)
    with RichView("http://here", console) as view:
        view._drawn = float("-inf")
        view.show(demo)
    assert isinstance(console.file, io.StringIO)
    assert "adcascade demo" in console.file.getvalue()
    assert console.file.getvalue().endswith("\x1b[2K")  # the last of its lines is wiped


def test_in_a_pipe_it_says_where_the_metrics_and_the_status_page_are_and_a_line_per_quarter(capsys):
    demo = Demo(DemoSettings(users=5, episodes=3))
    with PlainView("http://here") as view:
        while not demo.finished:
            demo.step()
            view.show(demo)
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["metrics: http://here/metrics", "status page: http://here/"]
    assert [line[:4] for line in lines[2:]] == [" 25%", " 50%", " 75%"]


def test_a_rate_forgets_what_is_long_ago():
    speed = Speed(looks=2)
    assert [speed.at(now, count) for now, count in ((0.0, 0), (1.0, 1000), (2.0, 1000), (3.0, 1000))] == [
        0,
        1000,
        500,
        0,
    ]


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
