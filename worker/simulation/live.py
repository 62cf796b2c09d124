"""What a person sees while a demo runs: a picture that moves on a terminal, a few lines anywhere else."""

from __future__ import annotations

import importlib.util
import math
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from worker.console import note
from worker.simulation.demo.ledger import Row, totals
from worker.simulation.demo.run import TICK, Demo
from worker.simulation.demo.summary import has_budget
from worker.simulation.users import BEGINNING

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

REFRESH = 0.12  # seconds between two pictures
RECENT = 10  # episodes that "lately" stands for
QUARTERS = 4
ROOMY, WIDEST = 96, 108  # columns of the terminal
TALL = 6  # lines of a curve


Shown = TypeVar("Shown", contravariant=True)


class View(Protocol[Shown]):
    """Shows how a run goes; a context manager."""

    def __enter__(self) -> View[Shown]:
        """Begin to show."""

    def __exit__(self, *exc: Any) -> None:
        """Leave nothing behind."""

    def show(self, run: Shown, /) -> None:
        """Look at the run; called very often, so it usually does nothing."""


def can_draw() -> bool:
    """Whether standard error is a terminal, and rich is there to draw on it."""
    return sys.stderr.isatty() and importlib.util.find_spec("rich") is not None


def live_view(url: str) -> View[Demo]:
    """Return the view for standard error as it is; `url` is where the metrics are."""
    return RichView(url) if can_draw() else PlainView(url)


# ── anywhere ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class PlainView:
    """Two lines at the start, and one after each quarter but the last."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._told = 0

    def __enter__(self) -> PlainView:
        note(f"metrics: {self._url}/metrics")
        note(f"status page: {self._url}/")
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def show(self, demo: Demo) -> None:
        """Print a line if another quarter is done."""
        quarter = int(demo.done * QUARTERS)
        if quarter <= self._told or demo.finished:
            return
        self._told = quarter
        lately = totals(demo.rows[-RECENT:])
        note(
            f"{demo.done:4.0%}  episode {len(demo.rows)} of {demo.settings.episodes}, "
            f"{totals(demo.rows).sessions:,} sessions, lately {lately.served_share:.1%} of the oracle's revenue"
        )


# ── on a terminal ────────────────────────────────────────────────────────────────────────────────────────────────────


class RichView:
    """Draws one picture over the other."""

    def __init__(self, url: str, console: Console | None = None) -> None:
        from rich.console import Console
        from rich.live import Live

        self._url = url
        self._console = console or Console(stderr=True)
        # Drawn by the thread that runs the demo, between two steps: nothing changes while it is looked at.
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._began = self._drawn = time.perf_counter()
        self._speed = Speed()

    def __enter__(self) -> RichView:
        self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._live.stop()

    def show(self, demo: Demo) -> None:
        """Draw the demo if it is time to."""
        now = time.perf_counter()
        if now - self._drawn < REFRESH:
            return
        self._drawn = now
        rate = self._speed.at(now, demo.counts["decisions"])
        self._live.update(picture(demo, self._url, now - self._began, rate, self._console.width), refresh=True)


class Speed:
    """A rate over the last few looks, so that it can be read.

    >>> speed = Speed()
    >>> speed.at(10.0, 100), speed.at(12.0, 300)
    (0.0, 100.0)
    """

    def __init__(self, looks: int = 12) -> None:
        self._looks = looks
        self._seen: list[tuple[float, int]] = []

    def at(self, now: float, count: int) -> float:
        """Take a look; return the rate since the oldest one remembered."""
        self._seen = [*self._seen[-self._looks :], (now, count)]
        before, fewer = self._seen[0]
        return (count - fewer) / (now - before) if now > before else 0.0


def picture(demo: Demo, url: str, seconds: float, rate: float, width: int) -> RenderableType:
    """Return the picture of one moment, for a terminal of `width` columns."""
    from rich import box
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    settings = demo.settings
    width = min(width - 2, WIDEST)  # room for the ^C that a terminal echoes: a line that wraps would stay behind
    # By name: what is sorted by numbers that grow jumps about.
    letters = "  ".join(f"{reason} {count}" for reason, count in sorted(demo.dead_letters.items())) or "none"
    return Panel(
        Group(
            _progress(demo, seconds),
            Text(),
            _figures(demo, rate, columns=3 if width >= ROOMY else 2),
            Text(),
            _curves(demo.rows, settings.episodes, (width - 9) // 2),
            Text.assemble(("dead letters  ", "dim"), letters, no_wrap=True, overflow="ellipsis"),
        ),
        title=f"[bold]adcascade demo[/]  {settings.environment} · {settings.policy} · seed {settings.seed}",
        subtitle=f"[dim]{url}/ · /metrics · Ctrl-C ends it here[/]",
        title_align="left",
        subtitle_align="right",
        box=box.ROUNDED,
        border_style="cyan",
        padding=(0, 2),
        width=width,
    )


def _progress(demo: Demo, seconds: float) -> RenderableType:
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    minutes, rest = divmod((demo.time - BEGINNING) // TICK, 60)
    line = Table.grid(expand=True, padding=(0, 2))
    line.add_column(ratio=1)
    line.add_column(no_wrap=True)
    line.add_row(
        ProgressBar(total=1.0, completed=demo.done, complete_style="cyan", finished_style="cyan"),
        f"[dim]episode[/] {len(demo.rows)}/{demo.settings.episodes}  "
        f"[dim]event time[/] {minutes // 60}:{minutes % 60:02}:{rest:02}  [dim]in[/] {seconds:.0f} s",
    )
    return line


def _figures(demo: Demo, rate: float, columns: int) -> RenderableType:
    from rich.table import Table

    whole, lately = totals(demo.rows), totals(demo.rows[-RECENT:])
    displays = sum(row.episode.displays for row in demo.rows[-RECENT:])
    budget = f" (of {lately.allowed / max(1, lately.sessions):.1%})" if has_budget(demo) else ""
    cells = (
        ("sessions", f"{whole.sessions:,}"),
        ("revenue earned", f"{whole.earned:,.1f}"),
        ("exploring", f"{lately.explored / max(1, lately.sessions):.1%}{budget}"),
        ("decisions", f"{demo.counts['decisions']:,} ({rate:,.0f}/s)"),
        ("slates served", f"{whole.served:,.1f}"),
        ("parameters", f"version {demo.parameters.version}"),
        ("click rate", f"{lately.clicks / max(1, displays):.1%} of displays"),
        ("oracle", f"{whole.oracle:,.1f}"),
        ("open sessions", f"{demo.open_sessions:,}"),
    )
    grid = Table.grid(expand=True, padding=(0, 2, 0, 0))
    for _ in range(columns):
        grid.add_column(ratio=1, no_wrap=True)
    for first in range(0, len(cells), columns):
        grid.add_row(*(f"[dim]{name:<14}[/] [bold]{value}[/]" for name, value in cells[first : first + columns]))
    return grid


def _curves(rows: Sequence[Row], episodes: int, width: int) -> RenderableType:
    from rich.table import Table

    regret = [row.score.regret / max(1, row.score.sessions) for row in rows]
    share = [row.score.served / row.score.oracle if row.score.oracle else 1.0 for row in rows]
    floor = min([0.9, *share])
    grid = Table.grid(expand=True, padding=(0, 2, 0, 0))
    grid.add_column(ratio=1)
    grid.add_column(ratio=1)
    grid.add_row(
        _curve("pseudo-regret/session", regret, episodes, width, "yellow", (0.0, max([1e-9, *regret])), "{:.4f}"),
        _curve("served/oracle", share, episodes, width, "green", (floor, 1.0), "{:.1%}"),
    )
    return grid


def _curve(
    title: str,
    values: Sequence[float],
    total: int,
    width: int,
    colour: str,
    bounds: tuple[float, float],
    form: str,
) -> Text:
    from rich.text import Text

    low, high = form.format(bounds[0]), form.format(bounds[1])
    margin = max(len(low), len(high)) + 1
    lines = area(values, total=total, width=width - margin - 1, height=TALL, low=bounds[0], high=bounds[1])
    text = Text.assemble((f"{title}  ", "dim"), (form.format(values[-1]) if values else "–", f"bold {colour}"), "\n")
    for place, line in enumerate(lines):
        scale = high if place == 0 else low if place == TALL - 1 else ""
        text.append(f"{scale:>{margin - 1}} ", style="dim")
        text.append(line + "\n", style=colour)
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
        drawn.append(min(levels, max(1, round(share * levels))))  # a dot at least: here is something
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
