"""The active troubles of a process: counted, logged at a bounded rate, and shown while they are active."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock
from typing import Final

from worker.stream.topology import Tally
from worker.stream.troubles import LONGEST_EXAMPLE, TROUBLES, TroubleKind

log = logging.getLogger(__name__)

#: Seconds for which a report counts. The alert waits one minute, so a single report is enough for it.
ACTIVE: Final = 180.0
#: Seconds between two log lines of a kind.
BETWEEN_LINES: Final = 60.0

_NOUNS: Final = {"feedback": "feedback records", "contexts": "sampled contexts"}


@dataclass(frozen=True, slots=True)
class ActiveTrouble:
    """A trouble that is active: its kind, the reports of the last minutes, their basis, and the last example."""

    name: str
    kind: TroubleKind
    times: int
    out_of: int
    example: str
    lasting: bool

    @property
    def detail(self) -> str:
        """How often it happens, and the example, in whole sentences; empty if there is neither."""
        of, example = self.kind.of, self.example.rstrip(".")
        share = (
            f"{self.times:,} of {self.out_of:,} {_NOUNS.get(of, of)} in the last minutes." if self.kind.share else ""
        )
        shown = example[:1].upper() + example[1:] if self.lasting else f"For example: {example}"
        return " ".join(part for part in (share, f"{shown}." if example else "") if part)

    @property
    def sentence(self) -> str:
        """What is wrong, an example, and what to do."""
        return " ".join(part for part in (self.kind.meaning, self.detail, self.kind.remedy) if part)


class _Recent:
    """A count of the last minutes, by the second."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def add(self, now: float, times: int) -> None:
        second = int(now)
        if second not in self._counts:
            self.sum(now)  # drops the old seconds
        self._counts[second] = self._counts.get(second, 0) + times

    def sum(self, now: float) -> int:
        self._counts = {second: times for second, times in self._counts.items() if now - second <= ACTIVE}
        return sum(self._counts.values())


@dataclass(slots=True)
class _Kind:
    recent: _Recent = field(default_factory=_Recent)
    example: str = ""
    lasting: bool = False
    logged: float = float("-inf")
    since_line: int = 0


class TroubleLog:
    """The reports of one process; safe to call from any thread.

    Troubles that happen are reported with `add`, or with `observe` for a whole batch. Troubles that last are reported
    with `set` when they begin, and with `clear` when they end.

    >>> troubles = TroubleLog(clock=lambda: 0.0)
    >>> troubles.set("clock", "an hour ahead")
    >>> [active.name for active in troubles.active()]
    ['clock']
    >>> troubles.clear("clock")
    >>> troubles.active()
    []
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = Lock()
        self._kinds = {name: _Kind() for name in TROUBLES}
        self._bases: dict[str, _Recent] = {kind.of: _Recent() for kind in TROUBLES.values()}

    def add(self, name: str, example: str, times: int = 1) -> None:
        """Report a trouble that happened."""
        self._report(name, example, times, lasting=False)

    def set(self, name: str, example: str) -> None:
        """Report a trouble that lasts until `clear`, or until an empty example; another report replaces the example."""
        if example:
            self._report(name, example, 1, lasting=True)
        else:
            self.clear(name)

    def _report(self, name: str, example: str, times: int, *, lasting: bool) -> None:
        now, kind = self._clock(), self._kinds[name]
        with self._lock:
            if not lasting:
                kind.recent.add(now, times)
            elif kind.lasting:
                times = 0  # counted when it began
            kind.lasting |= lasting
            kind.since_line += times
            # Names of arms and errors of the system may be part of it, and it goes into a line of the log.
            kind.example = "".join(one if one.isprintable() else "?" for one in example[:LONGEST_EXAMPLE])
            line = self._line(name, kind, now)
        if line:
            log.warning("%s", line)

    def count(self, **times: int) -> None:
        """Count what the shares of kinds refer to."""
        now = self._clock()
        with self._lock:
            for of in times:
                self._bases[of].add(now, times[of])

    def observe(self, tally: Tally) -> None:
        """Count a batch and report its troubles."""
        ended = tally.ended.total() - tally.ended["empty"]
        records = tally.arrivals + tally.feedback
        if records or ended:
            self.count(records=records, arrivals=tally.arrivals, feedback=tally.feedback, sessions=ended)
        for name, times, example in tally.troubles:
            self.add(name, example, times)

    def clear(self, name: str) -> None:
        """Report that a lasting trouble is over."""
        with self._lock:
            kind = self._kinds[name]
            over, kind.lasting = kind.lasting, False
            kind.logged = float("-inf") if over else kind.logged
        if over:
            log.info("trouble is over: %s", name)

    def _line(self, name: str, kind: _Kind, now: float) -> str:
        if now - kind.logged < BETWEEN_LINES or not (active := self._active(name, kind, now)):
            return ""
        kind.logged, times, kind.since_line = now, kind.since_line, 0
        return f"trouble {name}{f' ({times} times)' if times > 1 else ''}: {active.sentence}"

    def _active(self, name: str, kind: _Kind, now: float) -> ActiveTrouble | None:
        spec, recent, out_of = TROUBLES[name], kind.recent.sum(now), self._bases[TROUBLES[name].of].sum(now)
        if not kind.lasting and (recent < spec.least or recent <= spec.share * out_of):
            return None
        return ActiveTrouble(name, spec, recent or 1, max(out_of, recent), kind.example, kind.lasting)

    def active(self) -> list[ActiveTrouble]:
        """Return the active troubles, the worst first."""
        now = self._clock()
        with self._lock:
            found = [self._active(name, kind, now) for name, kind in self._kinds.items()]
        return sorted((one for one in found if one), key=lambda trouble: trouble.kind.level != "bad")
