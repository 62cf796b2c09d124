"""What a demo shows while it runs: a panel that moves on a terminal, a few lines in a pipe."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING

from worker.console import note
from worker.simulation.demo.ledger import totals
from worker.simulation.demo.run import TICK, Demo
from worker.simulation.demo.summary import summary, summary_rows
from worker.simulation.users import BEGINNING

if TYPE_CHECKING:
    from rich.console import RenderableType

REFRESH = 0.12  # seconds between two panels
RECENT = 10  # episodes that "lately" stands for
QUARTERS = 4
COLOUR = "cyan"
TREND = 40  # columns of the trend
_LEVELS = "▁▂▃▄▅▆▇█"


@contextmanager
def live_view(demo: Demo, url: str) -> Iterator[Callable[[], None]]:
    """Yield a function that shows the demo on standard error, to be called after every step; `url` is its web page."""
    began = drawn = time.perf_counter()
    if not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:
        note(f"metrics: {url}/metrics")
        note(f"status page: {url}/")
        quarter = 0

        def print_line() -> None:
            nonlocal quarter
            if quarter < int(demo.done * QUARTERS) < QUARTERS:
                quarter = int(demo.done * QUARTERS)
                note(line(demo))

        yield print_line
        return
    from rich.console import Console
    from rich.live import Live

    # Drawn by the thread that runs the demo, between two steps: nothing changes during the drawing.
    with Live(console=Console(stderr=True), auto_refresh=False, transient=True) as live:

        def draw() -> None:
            nonlocal drawn
            now = time.perf_counter()
            if now - drawn >= REFRESH:
                drawn = now
                live.update(panel(demo, url, now - began), refresh=True)

        yield draw


def line(demo: Demo) -> str:
    """Return the state of a demo in one line."""
    return (
        f"{demo.done:4.0%}  episode {len(demo.rows)} of {demo.settings.episodes}, "
        f"{totals(demo.rows).worth.sessions:,} sessions, "
        f"lately {totals(demo.rows[-RECENT:]).worth.share:.1%} of the oracle's revenue"
    )


def panel(demo: Demo, url: str, seconds: float) -> RenderableType:
    """Lay out a demo that has run for some seconds: its progress, the rows of its summary, and a trend."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.panel import Panel
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    settings, (minutes, rest) = demo.settings, divmod((demo.time - BEGINNING) // TICK, 60)
    shares = [row.worth.share for row in demo.rows]
    newest = f"{shares[-1]:.1%}" if shares else "–"
    progress, figures = Table.grid(padding=(0, 2, 0, 0)), Table.grid(padding=(0, 2, 0, 0))
    progress.add_row(
        ProgressBar(1.0, demo.done, width=24, complete_style=COLOUR, finished_style=COLOUR),
        f"[dim]episode[/] {len(demo.rows)}/{settings.episodes}  "
        f"[dim]event time[/] {minutes // 60}:{minutes % 60:02}:{rest:02}  [dim]in[/] {seconds:.0f} s",
    )
    for name, value, text in summary_rows(summary(demo), seconds):
        figures.add_row(Text(name, "dim"), Text(value, "bold"), Text(text, "dim", no_wrap=True, overflow="ellipsis"))
    trend = f"[dim]served/oracle[/]  [{COLOUR}]{sparkline(shares, min([0.9, *shares]), 1.0)}[/]  [bold]{newest}[/]"
    box = Panel(
        Group(progress, Text(), figures, Text(), trend),
        title=f"[bold]adcascade demo[/]  {settings.environment} · {settings.model} · {settings.policy} · "
        f"seed {settings.seed}",
        subtitle=f"[dim]{url}/ · /metrics · Ctrl-C ends the run[/]",
        title_align="left",
        subtitle_align="right",
        border_style=COLOUR,
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
