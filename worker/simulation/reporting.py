"""What demo and traffic show of themselves: a panel that moves on a terminal, lines in a pipe, a table at the end.

Panel and table have the same rows, each a name, a value and an explanation.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

from worker.console import note, table
from worker.simulation.worth import Worth

if TYPE_CHECKING:
    from rich.console import RenderableType

REFRESH = 0.12  # seconds between two panels
TREND = 40  # columns of a trend
_LEVELS = "▁▂▃▄▅▆▇█"

#: A name, a value and an explanation.
TableRow = tuple[str, str, str]
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
    rows: Sequence[TableRow],
    trends: Sequence[Trend],
) -> RenderableType:
    """Lay out a run: its progress, its figures and trends.

    `done` is the finished share of the run, None if it has no end. `title` and `status` may contain rich markup.
    """
    from rich.console import Group
    from rich.padding import Padding
    from rich.panel import Panel
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    bar = ProgressBar(1.0, done or 0.0, width=24, pulse=done is None, complete_style=colour, finished_style=colour)
    progress, figures, curves = (Table.grid(padding=(0, 2, 0, 0)) for _ in range(3))
    progress.add_row(bar, status)
    for name, value, text in rows:
        figures.add_row(Text(name, "dim"), Text(value, "bold"), Text(text, "dim", no_wrap=True, overflow="ellipsis"))
    for name, series, (low, high), form in trends:
        newest = format(series[-1], form) if series else "–"
        curves.add_row(f"[dim]{name}[/]", f"[{colour}]{sparkline(series, low, high)}[/]", f"[bold]{newest}[/]")
    box = Panel(
        Group(progress, Text(), figures, Text(), curves),
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


def trends(*runs: tuple[str, Sequence[Worth]]) -> list[Trend]:
    """Return the share of the oracle's revenue of each run, all on one scale, and of a single run the regret."""
    low = min([0.9, *(row.share for _, rows in runs for row in rows)])
    shares: list[Trend] = [(name, [row.share for row in rows], (low, 1.0), ".1%") for name, rows in runs]
    if len(runs) > 1:
        return shares
    regret = [row.regret_per_session for row in runs[0][1]]
    return [("pseudo-regret/session", regret, (0.0, max([1e-9, *regret])), ".5f"), *shares]


# ── numbers and rows ─────────────────────────────────────────────────────────────────────────────────────────────────


def by_tenth(name: str, first: Worth, last: Worth, whole: Worth) -> dict[str, float]:
    """Return a figure of the first and of the last tenth of a run, and of the whole run."""
    return {"first_tenth": getattr(first, name), "last_tenth": getattr(last, name), "overall": getattr(whole, name)}


def worth_numbers(first: Worth, last: Worth, whole: Worth) -> dict[str, Any]:
    """Return expected revenue, pseudo-regret and share of the oracle, in the tenths and overall."""
    return {
        "oracle_reward": whole.oracle,
        "served_reward": whole.served,
        "pseudo_regret": {
            "first_tenth": first.regret_per_session,
            "last_tenth": last.regret_per_session,
            "per_session": whole.regret_per_session,
            "total": whole.regret,
        },
        "revenue_share": by_tenth("share", first, last, whole),
    }


def worth_rows(numbers: Mapping[str, Any], *, earned: str) -> list[TableRow]:
    """Return the rows of clicks, revenue and regret; `earned` explains the revenue earned."""
    regret, share = numbers["pseudo_regret"], numbers["revenue_share"]
    oracle = f"expected; {share['overall']:.1%} of the oracle's {numbers['oracle_reward']:,.1f}"
    tenths = f"pseudo-regret, last tenth; {regret['first_tenth']:.5f} in the first"
    return [
        ("clicks", f"{numbers['clicks']:,}", f"{numbers['clicks'] / max(1, numbers['sessions']):.1%} of the sessions"),
        ("revenue served", f"{numbers['served_reward']:,.1f}", oracle),
        ("  first tenth", f"{share['first_tenth']:.1%}", "of the oracle's"),
        ("  last tenth", f"{share['last_tenth']:.1%}", "of the oracle's"),
        ("revenue earned", f"{numbers['reward']:,.1f}", earned),
        ("regret/session", f"{regret['last_tenth']:.5f}", tenths),
    ]


def laid_out(rows: Sequence[TableRow]) -> str:
    """Lay out rows as a table for people."""
    return table(["", "", ""], rows).lstrip("\n")


def flag(name: str, value: object) -> str:
    """Return a setting as an option of the command line.

    >>> flag("random_share", 0.1), flag("repeats", False)
    ('--random-share 0.1', '--no-repeats')
    """
    option = name.replace("_", "-")
    return f"--{'' if value else 'no-'}{option}" if isinstance(value, bool) else f"--{option} {value}"
