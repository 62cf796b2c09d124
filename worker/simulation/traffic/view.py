"""What a person sees while simulated traffic runs, and what is told at its end."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from worker import __version__
from worker.console import note, table
from worker.simulation.live import REFRESH, ROOMY, TALL, WIDEST, Speed, View, area, can_draw
from worker.simulation.traffic.generator import Traffic

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

LINES_EVERY: Final = 10.0  # seconds between two lines where there is no terminal
SETTLE_EVERY: Final = 0.25  # seconds between two updates of the accounts
LEAST_CURVE: Final = 30  # rows that a curve has room for at least


def traffic_view(url: str) -> View[Traffic]:
    """Return the view for standard error as it is; `url` is where the metrics are."""
    return RichView(url) if can_draw() else PlainView(url)


class _Regular:
    """Does something every so often."""

    def __init__(self, every: float) -> None:
        self._every = every
        self._last = time.perf_counter()

    def is_time(self, now: float) -> bool:
        if now - self._last < self._every:
            return False
        self._last = now
        return True


# ── anywhere ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class PlainView:
    """A line at the start, and one every few seconds."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._began = time.perf_counter()
        self._accounts, self._lines = _Regular(SETTLE_EVERY), _Regular(LINES_EVERY)
        self._speed = Speed(looks=1)

    def __enter__(self) -> PlainView:
        note(f"metrics: {self._url}/metrics")
        self._speed.at(self._began, 0)
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def show(self, traffic: Traffic) -> None:
        """Print a line if it is time to."""
        now = time.perf_counter()
        if self._accounts.is_time(now):
            traffic.settle(time.time_ns())
        if self._lines.is_time(now):
            counts, lately = traffic.counts, traffic.history.lately()
            note(
                f"{now - self._began:4.0f} s  {counts.sessions:,} sessions, {counts.events:,} records "
                f"({self._speed.at(now, counts.events):,.0f}/s), {traffic.waiting:,} wait, decisions in "
                f"{quantiles(traffic)}, lately {lately.share:.1%} of the oracle's revenue"
            )


def quantiles(traffic: Traffic) -> str:
    """Return how long decisions took, for people."""
    middle, most = traffic.latencies.quantile(0.5), traffic.latencies.quantile(0.99)
    return "–" if middle is None or most is None else f"{1000 * middle:.1f} ms (p99 {1000 * most:.1f} ms)"


# ── on a terminal ────────────────────────────────────────────────────────────────────────────────────────────────────


class RichView:
    """Draws one picture over the other."""

    def __init__(self, url: str, console: Console | None = None) -> None:
        from rich.console import Console
        from rich.live import Live

        self._url = url
        self._console = console or Console(stderr=True)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._began = time.perf_counter()
        self._drawing = _Regular(REFRESH)
        self._records, self._decisions = Speed(), Speed()

    def __enter__(self) -> RichView:
        self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._live.stop()

    def show(self, traffic: Traffic) -> None:
        """Draw the traffic if it is time to."""
        now = time.perf_counter()
        if not self._drawing.is_time(now):
            return
        traffic.settle(time.time_ns())
        counts = traffic.counts
        rates = self._records.at(now, counts.events), self._decisions.at(now, counts.decisions)
        self._live.update(picture(traffic, self._url, now - self._began, rates, self._console.width), refresh=True)


def picture(traffic: Traffic, url: str, seconds: float, rates: tuple[float, float], width: int) -> RenderableType:
    """Return the picture of one moment, for a terminal of `width` columns."""
    from rich import box
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    settings = traffic.settings
    width = min(width - 2, WIDEST)  # room for the ^C that a terminal echoes: a line that wraps would stay behind
    pace = "flat out" if settings.rate is None else f"{settings.rate:g} users/s"
    return Panel(
        Group(
            _progress(traffic, seconds),
            Text(),
            _figures(traffic, rates, columns=3 if width >= ROOMY else 2),
            Text(),
            _curves(traffic, (width - 9) // 2),
        ),
        title=f"[bold]adcascade traffic[/]  {settings.environment} · {pace} · seed {settings.seed}",
        subtitle=f"[dim]{url}/metrics · Ctrl-C ends it here[/]",
        title_align="left",
        subtitle_align="right",
        box=box.ROUNDED,
        border_style="magenta",
        padding=(0, 2),
        width=width,
    )


def done(traffic: Traffic, seconds: float) -> float | None:
    """Return how much of the traffic is done, from 0 to 1; None if it goes on until it is stopped."""
    settings = traffic.settings
    parts = []
    if settings.sessions:
        parts.append(traffic.counts.sessions / settings.sessions)
    if settings.duration:
        parts.append(1000 * seconds / settings.duration)
    return min(1.0, max(parts)) if parts else None


def _progress(traffic: Traffic, seconds: float) -> RenderableType:
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    share = done(traffic, seconds)
    line = Table.grid(expand=True, padding=(0, 2))
    line.add_column(ratio=1)
    line.add_column(no_wrap=True)
    bar = ProgressBar(
        total=1.0, completed=share or 0.0, pulse=share is None, complete_style="magenta", finished_style="magenta"
    )
    state = "the last users go" if traffic.closing else f"{traffic.waiting:,} wait for a decision"
    line.add_row(bar, f"{state}  [dim]in[/] {seconds:.0f} s")
    return line


def _figures(traffic: Traffic, rates: tuple[float, float], columns: int) -> RenderableType:
    from rich.table import Table

    counts, whole = traffic.counts, traffic.worth
    cells = (
        ("sessions", f"{counts.sessions:,}"),
        ("revenue earned", f"{counts.earned:,.1f}"),
        ("decision p50", _milliseconds(traffic.latencies.quantile(0.5))),
        ("records", f"{counts.events:,} ({rates[0]:,.0f}/s)"),
        ("slates served", f"{whole.served:,.1f}"),
        ("decision p99", _milliseconds(traffic.latencies.quantile(0.99))),
        ("decisions", f"{counts.decisions:,} ({rates[1]:,.0f}/s)"),
        ("oracle", f"{whole.oracle:,.1f}"),
        ("parameters", f"version {counts.version}" if counts.version >= 0 else "–"),
    )
    grid = Table.grid(expand=True, padding=(0, 2, 0, 0))
    for _ in range(columns):
        grid.add_column(ratio=1, no_wrap=True)
    for first in range(0, len(cells), columns):
        row = [f"[dim]{name:<14}[/] [bold]{value}[/]" for name, value in cells[first : first + columns]]
        grid.add_row(*row, *[""] * (columns - len(row)))
    return grid


def _milliseconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{1000 * seconds:.1f} ms"


def _curves(traffic: Traffic, width: int) -> RenderableType:
    from rich.table import Table

    rows = [row for row in traffic.history if row.sessions]
    regret = [row.regret_per_session for row in rows]
    share = [row.share for row in rows]
    total = max(LEAST_CURVE, len(rows))
    grid = Table.grid(expand=True, padding=(0, 2, 0, 0))
    grid.add_column(ratio=1)
    grid.add_column(ratio=1)
    grid.add_row(
        _curve("pseudo-regret/session", regret, total, width, "yellow", (0.0, max([1e-9, *regret])), "{:.5f}"),
        _curve("served/oracle", share, total, width, "green", (min([0.9, *share]), 1.0), "{:.1%}"),
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


# ── at the end ───────────────────────────────────────────────────────────────────────────────────────────────────────


def summary(traffic: Traffic, seconds: float) -> dict[str, Any]:
    """Return the numbers of a run.

    `reward` was earned by clicks. `oracle_reward` and `served_reward` are expectations under the true model, for the
    sessions whose whole slate was seen: of the best slates and of those served. `pseudo_regret` is their difference per
    session, on average over the first and the last tenth of the time and over all of it; `total` is not divided.
    `undecided` sessions got no decision, `forsaken` ones no further one. `latency` is from sending an arrival to
    hearing its first decision, in seconds, as this client saw it.
    """
    counts, whole = traffic.counts, traffic.worth
    first, last = traffic.history.tenths()
    latencies = traffic.latencies
    return {
        "sessions": counts.sessions,
        "decided": counts.decided,
        "undecided": counts.sessions - counts.decided,
        "forsaken": traffic.forsaken,
        "decisions": counts.decisions,
        "clicks": counts.clicks,
        "reward": counts.earned,
        "oracle_reward": whole.oracle,
        "served_reward": whole.served,
        "pseudo_regret": {
            "first_tenth": first.regret_per_session,
            "last_tenth": last.regret_per_session,
            "per_session": whole.regret_per_session,
            "total": whole.regret,
        },
        "revenue_share": {"first_tenth": first.share, "last_tenth": last.share, "overall": whole.share},
        "latency": {
            "p50": latencies.quantile(0.5),
            "p99": latencies.quantile(0.99),
            "mean": latencies.mean,
            "longest": latencies.longest if latencies.count else None,
        },
        "records": {**counts.records, "total": counts.events, "per_second": counts.events / traffic.active_seconds},
        "other_decisions": counts.others,
        "modes": {mode: count for mode, count in counts.modes.items() if count},
        "parameters_version": counts.version if counts.version >= 0 else None,
        "skipped_seconds": counts.skipped / 1000,
        "finished": traffic.finished,
        "seconds": round(seconds, 3),
        "settings": asdict(traffic.settings),
        "version": __version__,
    }


def summary_table(numbers: Mapping[str, Any]) -> str:
    """Lay out a summary for people."""
    regret, share, records = numbers["pseudo_regret"], numbers["revenue_share"], numbers["records"]
    latency = numbers["latency"]
    rows = [
        ["sessions", f"{numbers['sessions']:,}", f"{numbers['undecided']:,} without a decision"],
        ["records sent", f"{records['total']:,}", f"{records['per_second']:,.0f} per second"],
        [
            "decisions",
            f"{numbers['decisions']:,}",
            f"the first after {_milliseconds(latency['p50'])}, p99 {_milliseconds(latency['p99'])}",
        ],
        ["clicks", f"{numbers['clicks']:,}", f"{numbers['clicks'] / max(1, numbers['sessions']):.1%} of the sessions"],
        [
            "revenue served",
            f"{numbers['served_reward']:,.1f}",
            f"expected; {share['overall']:.1%} of the oracle's {numbers['oracle_reward']:,.1f}",
        ],
        ["  first tenth", f"{share['first_tenth']:.1%}", "of the oracle's"],
        ["  last tenth", f"{share['last_tenth']:.1%}", "of the oracle's"],
        ["revenue earned", f"{numbers['reward']:,.1f}", "by clicks; some users never answer"],
        [
            "regret/session",
            f"{regret['last_tenth']:.5f}",
            f"pseudo-regret in the last tenth; {regret['first_tenth']:.5f} in the first",
        ],
    ]
    if numbers["forsaken"]:
        rows.insert(1, ["  forsaken", f"{numbers['forsaken']:,}", "waited in vain for another decision"])
    if numbers["skipped_seconds"]:
        rows.append(
            ["skipped", f"{numbers['skipped_seconds']:.1f} s", "of users: this machine cannot keep up the rate"]
        )
    return table(["", "", ""], rows).lstrip("\n")
