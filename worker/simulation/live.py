"""The live view of a run: a panel that moves on a terminal, a few lines in a pipe."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

from worker.console import note
from worker.simulation.worth import Worth

if TYPE_CHECKING:
    from rich.console import RenderableType

REFRESH = 0.12  # seconds between two panels
TREND = 40  # columns of a trend
_LEVELS = "▁▂▃▄▅▆▇█"

#: A name with a series of values, their range, and the format of a value.
Trend = tuple[str, Sequence[float], tuple[float, float], str]


class Source(Protocol):
    """A run that can be shown; `seconds` count from the start of the view."""

    @property
    def opening(self) -> Sequence[str]:
        """The first lines for a pipe."""

    def line(self, seconds: float) -> str | None:
        """Return the next line for a pipe, or None if it is not time for one."""

    def panel(self, seconds: float) -> RenderableType:
        """Return the next panel for a terminal."""


@contextmanager
def live_view(source: Source) -> Iterator[Callable[[], None]]:
    """Yield a function that shows the source on standard error; to be called after every step of the run."""
    began = drawn = time.perf_counter()
    if not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:
        for line in source.opening:
            note(line)

        def print_line() -> None:
            line = source.line(time.perf_counter() - began)
            if line is not None:
                note(line)

        yield print_line
        return
    from rich.console import Console
    from rich.live import Live

    # Drawn by the thread that runs the source, between two steps: nothing changes during the drawing.
    with Live(console=Console(stderr=True), auto_refresh=False, transient=True) as live:

        def draw() -> None:
            nonlocal drawn
            now = time.perf_counter()
            if now - drawn >= REFRESH:
                drawn = now
                live.update(source.panel(now - began), refresh=True)

        yield draw


def panel(
    *,
    title: str,
    address: str,
    colour: str,
    done: float | None,
    status: str,
    figures: Sequence[tuple[str, str]],
    trends: Sequence[Trend],
    footer: str = "",
) -> RenderableType:
    """Lay out a run: its progress, figures in two columns, and trends.

    `done` is the finished share of the run, None if it has no end. `title` and `status` may contain rich markup.
    """
    from rich.console import Group
    from rich.padding import Padding
    from rich.panel import Panel
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    bar = ProgressBar(1.0, done or 0.0, width=24, pulse=done is None, complete_style=colour, finished_style=colour)
    progress, values, curves = (Table.grid(padding=(0, 2, 0, 0)) for _ in range(3))
    progress.add_row(bar, status)
    for left, right in zip(figures[::2], [*figures[1::2], ("", "")], strict=False):
        values.add_row(f"[dim]{left[0]}[/]", f"[bold]{left[1]}[/]", f"[dim]{right[0]}[/]", f"[bold]{right[1]}[/]")
    for name, series, (low, high), form in trends:
        newest = format(series[-1], form) if series else "–"
        curves.add_row(f"[dim]{name}[/]", f"[{colour}]{sparkline(series, low, high)}[/]", f"[bold]{newest}[/]")
    parts: list[RenderableType] = [progress, Text(), values, Text(), curves]
    if footer:
        parts.append(Text(footer, style="dim", no_wrap=True, overflow="ellipsis"))
    box = Panel(
        Group(*parts),
        title=title,
        subtitle=f"[dim]{address} · Ctrl-C ends the run[/]",
        title_align="left",
        subtitle_align="right",
        border_style=colour,
        padding=(0, 2),
        expand=False,
    )
    return Padding(box, (0, 2, 0, 0), expand=False)  # room for the ^C that a terminal echoes


def sparkline(values: Sequence[float], low: float, high: float, width: int = TREND) -> str:
    """Draw a series in one line, as means of as many parts as there are columns.

    >>> sparkline([0.0, 0.5, 1.0], 0.0, 1.0)
    '▁▅█'
    """
    columns = min(width, len(values))
    bounds = [len(values) * column // columns for column in range(columns + 1)] if columns else []
    parts = [values[first:last] for first, last in pairwise(bounds)]
    shares = [(sum(part) / len(part) - low) / max(high - low, 1e-12) for part in parts]
    return "".join(_LEVELS[max(0, min(7, int(8 * share)))] for share in shares)


def revenue_trends(rows: Sequence[Worth]) -> tuple[Trend, Trend]:
    """Return the trends of the pseudo-regret per session and of the share of the oracle's revenue."""
    regret, share = [row.regret_per_session for row in rows], [row.share for row in rows]
    return (
        ("pseudo-regret/session", regret, (0.0, max([1e-9, *regret])), ".5f"),
        ("served/oracle", share, (min([0.9, *share]), 1.0), ".1%"),
    )


def compared_trends(runs: Sequence[tuple[str, Sequence[Worth]]]) -> tuple[Trend, ...]:
    """Return the share of the oracle's revenue of several runs, all on one scale."""
    low = min([0.9, *(row.share for _, rows in runs for row in rows)])
    return tuple((f"{name}: served/oracle", [row.share for row in rows], (low, 1.0), ".1%") for name, rows in runs)
