"""The live view of a run: a moving picture on a terminal, a few lines in a pipe.

A source (the demo, the traffic) supplies the figures and curves; everything that draws is in this file.
"""

from __future__ import annotations

import importlib.util
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from worker.console import note
from worker.simulation.worth import Worth

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

REFRESH = 0.12  # seconds between two pictures
ROOMY, WIDEST = 96, 108  # columns of the terminal
TALL = 6  # lines of a curve


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A series of values; `total` of them would fill the width, `low` and `high` are the bounds of the axis."""

    title: str
    values: Sequence[float]
    total: int
    low: float
    high: float
    form: str
    colour: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """The content of one picture.

    `done` is the finished share of the run, None if the run has no end. `address` is where the metrics are. `figures`
    are pairs of name and value. `title` and `status` may contain rich markup.
    """

    title: str
    address: str
    colour: str
    done: float | None
    status: str
    figures: Sequence[tuple[str, str]]
    curves: Sequence[Curve]
    footer: tuple[str, str] | None = None


class Source(Protocol):
    """A run that can be shown; `seconds` count from the start of the view."""

    @property
    def opening(self) -> Sequence[str]:
        """The first lines for a pipe."""

    def line(self, seconds: float) -> str | None:
        """Return the next line for a pipe, or None if it is not time for one."""

    def frame(self, seconds: float) -> Frame:
        """Return the content of the next picture."""


def live_view(source: Source) -> PlainView | RichView:
    """Return the view that suits standard error: pictures on a terminal if rich is installed, else lines."""
    drawable = sys.stderr.isatty() and importlib.util.find_spec("rich") is not None
    return RichView(source) if drawable else PlainView(source)


class PlainView:
    """Prints the lines of the source."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._began = time.perf_counter()

    def __enter__(self) -> PlainView:
        for line in self._source.opening:
            note(line)
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def show(self) -> None:
        """Print a line if the source has one."""
        line = self._source.line(time.perf_counter() - self._began)
        if line is not None:
            note(line)


class RichView:
    """Draws each picture over the one before, and removes the last one at the end."""

    def __init__(self, source: Source, console: Console | None = None) -> None:
        from rich.console import Console
        from rich.live import Live

        self._source = source
        self._console = console or Console(stderr=True)
        # Drawn by the thread that runs the source, between two steps: nothing changes during the drawing.
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._began = self._drawn = time.perf_counter()

    def __enter__(self) -> RichView:
        self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._live.stop()

    def show(self) -> None:
        """Draw a picture if the last one is old enough."""
        now = time.perf_counter()
        if now - self._drawn < REFRESH:
            return
        self._drawn = now
        self._live.update(picture(self._source.frame(now - self._began), self._console.width), refresh=True)


class Speed:
    """A rate over the last few looks, so that a person can read it.

    >>> speed = Speed()
    >>> speed.at(10.0, 100), speed.at(12.0, 300)
    (0.0, 100.0)
    """

    def __init__(self, looks: int = 12) -> None:
        self._looks = looks
        self._seen: list[tuple[float, int]] = []

    def at(self, now: float, count: int) -> float:
        """Add a look; return the rate since the oldest look kept."""
        self._seen = [*self._seen[-self._looks :], (now, count)]
        before, fewer = self._seen[0]
        return (count - fewer) / (now - before) if now > before else 0.0


# ── drawing ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def revenue_curves(rows: Sequence[Worth], total: int) -> tuple[Curve, Curve]:
    """Return the curves of the pseudo-regret per session and of the share of the oracle's revenue."""
    regret, share = [row.regret_per_session for row in rows], [row.share for row in rows]
    top, floor = max([1e-9, *regret]), min([0.9, *share])
    return (
        Curve(title="pseudo-regret/session", values=regret, total=total, low=0, high=top, form=".5f", colour="yellow"),
        Curve(title="served/oracle", values=share, total=total, low=floor, high=1.0, form=".1%", colour="green"),
    )


def compared_curves(runs: Sequence[tuple[str, Sequence[Worth]]], total: int) -> tuple[Curve, ...]:
    """Return the curves of the share of the oracle's revenue of several runs, all on one scale."""
    shares = [(name, [row.share for row in rows]) for name, rows in runs]
    floor = min([0.9, *(share for _, values in shares for share in values)])
    return tuple(
        Curve(
            title=f"{name}: served/oracle", values=values, total=total, low=floor, high=1.0, form=".1%", colour=colour
        )
        for (name, values), colour in zip(shares, ("green", "yellow"), strict=False)
    )


def picture(frame: Frame, width: int) -> RenderableType:
    """Draw a frame for a terminal of `width` columns."""
    from rich import box
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    width = min(width - 2, WIDEST)  # room for the ^C that a terminal echoes: a line that wraps would remain
    figures = [f"[dim]{name:<14}[/] [bold]{value}[/]" for name, value in frame.figures]
    columns = 3 if width >= ROOMY else 2
    parts: list[RenderableType] = [
        _progress(frame),
        Text(),
        _grid([figures[first : first + columns] for first in range(0, len(figures), columns)]),
        Text(),
        _grid([[_curve(curve, (width - 9) // 2) for curve in frame.curves]]),
    ]
    if frame.footer is not None:
        name, text = frame.footer
        parts.append(Text.assemble((f"{name}  ", "dim"), text, no_wrap=True, overflow="ellipsis"))
    return Panel(
        Group(*parts),
        title=frame.title,
        subtitle=f"[dim]{frame.address} · Ctrl-C ends the run[/]",
        title_align="left",
        subtitle_align="right",
        box=box.ROUNDED,
        border_style=frame.colour,
        padding=(0, 2),
        width=width,
    )


def _progress(frame: Frame) -> RenderableType:
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    line = Table.grid(expand=True, padding=(0, 2))
    line.add_column(ratio=1)
    line.add_column(no_wrap=True)
    bar = ProgressBar(
        total=1.0,
        completed=frame.done or 0.0,
        pulse=frame.done is None,
        complete_style=frame.colour,
        finished_style=frame.colour,
    )
    line.add_row(bar, frame.status)
    return line


def _grid(rows: Sequence[Sequence[RenderableType]]) -> RenderableType:
    from rich.table import Table

    grid = Table.grid(expand=True, padding=(0, 2, 0, 0))
    for _ in rows[0]:
        grid.add_column(ratio=1, no_wrap=True)
    for row in rows:
        grid.add_row(*row)
    return grid


def _curve(curve: Curve, width: int) -> Text:
    from rich.text import Text

    low, high = format(curve.low, curve.form), format(curve.high, curve.form)
    margin = max(len(low), len(high)) + 1
    lines = area(curve.values, total=curve.total, width=width - margin - 1, height=TALL, low=curve.low, high=curve.high)
    newest = format(curve.values[-1], curve.form) if curve.values else "–"
    text = Text.assemble((f"{curve.title}  ", "dim"), (newest, f"bold {curve.colour}"), "\n")
    for index, line in enumerate(lines):
        scale = high if index == 0 else low if index == TALL - 1 else ""
        text.append(f"{scale:>{margin - 1}} ", style="dim")
        text.append(line + "\n", style=curve.colour)
    return text


#: Bits of a braille character for the left and the right column of dots, from the bottom up.
_DOTS = ((0x40, 0x04, 0x02, 0x01), (0x80, 0x20, 0x10, 0x08))


def area(values: Sequence[float], *, total: int, width: int, height: int, low: float, high: float) -> list[str]:
    """Draw values as an area of braille dots, two by four to a character; `total` values would fill the width.

    >>> for line in area([1.0, 2.0, 3.0, 4.0], total=4, width=2, height=1, low=0.0, high=4.0):
    ...     print(line)
    ⣠⣾
    """
    columns = 2 * max(1, width)
    levels = 4 * height
    drawn = []
    for column in range(columns):
        first, last = column * total / columns, (column + 1) * total / columns
        if math.floor(first) >= len(values):
            break
        part = values[math.floor(first) : max(math.floor(first) + 1, math.ceil(last))]
        share = (sum(part) / len(part) - low) / (high - low) if high > low else 0.0
        drawn.append(min(levels, max(1, round(share * levels))))  # at least one dot, so that a zero is seen
    lines = []
    for line in range(height - 1, -1, -1):
        cells = []
        for left in range(0, columns, 2):
            bits = 0
            for side, column in enumerate((left, left + 1)):
                reached = drawn[column] - 4 * line if column < len(drawn) else 0
                bits |= sum(_DOTS[side][: max(0, min(4, reached))])
            cells.append(chr(0x2800 + bits))
        lines.append("".join(cells))
    return lines
