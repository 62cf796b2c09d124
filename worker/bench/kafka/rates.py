"""What a client waits for, at the rates that most users have: whole sessions at 20 to 5,000 arrivals per second.

In every round each of the three starts on topics of its own, serves all rates one after the other, and ends; so a
machine that is slower for a while is slower for all of them. The client is a process of its own that sends requests it
has encoded beforehand, and a reader that unpacks nothing (`live`). A wait is from sending an arrival to reading its
first decision. The processor time is that of the server's own process, without the learner, for a tick of the client:
up to 1,000 arrivals per second, a server that keeps up needs about one poll for each.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite

import numpy as np

from worker.bench.figures import Figure
from worker.bench.kafka.live import LONG, LiveRun
from worker.errors import FailedError

PARTITIONS = 8
ROUNDS = 5
WARM = 1.5  # seconds of each rate that do not count
NAMES = {"raw": "(a)", "agent": "(b)", "worker": "(c)"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """A rate of arrivals, how it is played, and the bars: ratios to (a), or milliseconds where there is no ratio."""

    arrivals: int
    seconds: float
    tick: float  # seconds between two requests of the client: not a divisor of the periods of a worker
    kinds: tuple[str, ...] = ("raw", "agent", "worker")
    p50: float = 2.0
    p99: float = 2.0
    is_ratio: bool = True


RATES = (
    Rate(arrivals=20, seconds=12.0, tick=0.007, p50=1.5),
    Rate(arrivals=200, seconds=6.0, tick=0.007, p50=1.7),
    Rate(arrivals=1_000, seconds=6.0, tick=0.003),
    Rate(arrivals=5_000, seconds=6.0, tick=0.006, kinds=("raw", "worker"), p50=15, p99=60, is_ratio=False),
)
FIGURES = sum(len(rate.kinds) + (3 if rate.is_ratio else 1) + 1 for rate in RATES)

#: Plays all rates against one of the three; returns the runs in the order of the rates, None where it was too slow.
PlayRates = Callable[[str, Sequence[Rate]], Sequence[LiveRun | None]]


def keeps_up(run: LiveRun) -> bool:
    """Whether half of the clients wait for less than `LONG`."""
    return float(np.median(run.latency(WARM).waits)) <= LONG


@dataclass(slots=True)
class Waits:
    """Waits of one rate in milliseconds: per kind, an array for each round; None where it did not keep up.

    `ticks` are milliseconds of processor time for a tick of the client, per kind, one for each round that kept up.
    """

    rounds: dict[str, list[np.ndarray | None]] = field(default_factory=lambda: defaultdict(list))
    ticks: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    records: float = 0.0  # of a tick

    def add(self, kind: str, run: LiveRun | None) -> None:
        """Add a round."""
        if run is None or not keeps_up(run):
            self.rounds[kind].append(None)
            return
        self.rounds[kind].append(run.latency(WARM).waits)
        self.ticks[kind].append(1000 * run.processor / len(run.sent.times))
        self.records = run.sent.events[-1] / len(run.sent.times)

    def quantile(self, kind: str, share: float) -> float | None:
        """Return the median over the rounds of a quantile; None if it did not keep up in half of them."""
        found = [inf if waits is None else float(np.quantile(waits, share)) for waits in self.rounds[kind]]
        middle = statistics.median(found) if found else inf
        return middle if isfinite(middle) else None

    def ratio(self, kind: str, other: str, share: float) -> tuple[float, float, float] | None:
        """Return the median, the lowest and the highest ratio of quantiles, round by round; None without any.

        The ratio of a round is infinite if only the other kept up.
        """
        ratios = [
            inf if mine is None else float(np.quantile(mine, share) / np.quantile(theirs, share))
            for mine, theirs in zip(self.rounds[kind], self.rounds[other], strict=True)
            if theirs is not None
        ]
        return (statistics.median(ratios), min(ratios), max(ratios)) if ratios else None


def measure_rates(play: PlayRates, rounds: int = ROUNDS) -> Iterator[Figure | str]:
    """Yield the figures of all rates, and before each part the step that follows."""
    waits = {rate: Waits() for rate in RATES}
    for turn in range(rounds):
        for kind in NAMES:
            yield f"as a client sees it, round {turn + 1} of {rounds}, {NAMES[kind]}"
            rates = [rate for rate in RATES if kind in rate.kinds]
            for rate, run in zip(rates, play(kind, rates), strict=True):
                waits[rate].add(kind, run)
    for rate, seen in waits.items():
        yield from _figures(rate, seen)


def _figures(rate: Rate, seen: Waits) -> Iterator[Figure]:
    where = f"at {rate.arrivals:,} arrivals/s"
    for kind in rate.kinds:
        middle, high = seen.quantile(kind, 0.5), seen.quantile(kind, 0.99)
        rounds = f"medians of {len(seen.rounds[kind])} rounds"
        if late := sum(waits is None for waits in seen.rounds[kind]):
            rounds += f", in {late} of which it did not keep up"
        if middle is None or high is None:
            if kind == "worker":
                raise FailedError(
                    f"the worker does not keep up {where}: half of the clients wait more than {LONG:g} ms"
                )
            detail = f"does not keep up {where}: half of the clients wait longer than this"
            yield Figure(f"{NAMES[kind]} {where}", LONG, "ms", detail=detail)
            continue
        bar = rate.p50 if kind == "worker" and not rate.is_ratio else None
        detail = f"p50 from arrival to decision; p99 {high:.1f} ms, {rounds}"
        yield Figure(f"{NAMES[kind]} {where}", middle, "ms", most=bar, detail=detail)
    yield _processor(where, seen)
    if not rate.is_ratio:
        high = seen.quantile("worker", 0.99)
        assert high is not None
        yield Figure(f"(c) {where}, p99", high, "ms", most=rate.p99)
        return
    for other, share, most in (("raw", 0.5, rate.p50), ("raw", 0.99, rate.p99), ("agent", 0.5, 1.1)):
        name = f"(c) / {NAMES[other]} {where}, p{share * 100:.0f}"
        found = seen.ratio("worker", other, share)
        if found is None:
            mine = seen.quantile("worker", share) or LONG
            yield Figure(name, mine / LONG, "×", most=most, detail=f"at most: {NAMES[other]} does not keep up")
            continue
        middle, low, high = found
        yield Figure(
            name, middle, "×", most=most, detail=f"{low:.3g} to {high:.3g} in {len(seen.rounds[other])} rounds"
        )


def _processor(where: str, seen: Waits) -> Figure:
    spent = {kind: statistics.median(ticks) for kind, ticks in seen.ticks.items()}
    others = "".join(f"; {NAMES[kind]} {spent[kind]:.2f} ms" for kind in NAMES if kind != "worker" and kind in spent)
    detail = f"for a tick of {seen.records:.1f} records, without the learner{others}"
    return Figure(f"(c) {where}, processor time", spent["worker"], "ms", detail=detail)
