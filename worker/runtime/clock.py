"""The clock of a worker, compared with the brokers' clock.

Rules that hold here (docs/design.md §4, "Clocks"):

- The **reference** is the newest time that a broker has put on a progress record, plus what has passed since. Only a
  topic with `message.timestamp.type=LogAppendTime` carries the time of its broker. Without such times, the reference is
  the clock at a moment when a record of the inputs agreed with it, or else at the start, plus what has passed since: it
  shows steps of the clock, but not a clock that was wrong from the beginning.
- Clock and reference that differ by less than a bound are the same, and the clock counts.
- Of two that differ, it is unknown which one is right. Progress takes the **earlier**: too late a progress delays
  learning, too early a progress loses feedback. The check for future events takes the **later**: too late a bound lets
  an event through that the learner can refuse, too early a bound turns good traffic into dead letters.
- A clock that nothing has confirmed yet, neither a broker nor a record of the inputs, rejects only events that are
  hours ahead of it. So a worker that starts with a clock behind turns no backlog into dead letters.
- Both are compared anew every time. So everything continues as soon as the clock is right again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from worker.stream.decoding import MAX_FACT_LEAD, MAX_PROGRESS_LEAD

Clock = Callable[[], int]

#: Milliseconds by which an unconfirmed clock may be behind. The learner accepts facts of twice that.
UNCONFIRMED: Final = MAX_FACT_LEAD // 2


def wall_clock() -> int:
    """Return the milliseconds since the epoch."""
    return time.time_ns() // 1_000_000


# Counts on while the machine is suspended, where the system has such a clock. Nobody sets it.
_STEADY = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def steady_clock() -> int:
    """Return milliseconds since some moment, on a clock that is never set."""
    return time.clock_gettime_ns(_STEADY) // 1_000_000


def clock_of(file: str | None) -> Clock:
    """Return the machine's clock, or, for tests, one that reads its time from a file.

    With a file, event time passes as the test writes it, and runs on Kafka can be compared to the bit with runs of the
    embedded runner.
    """
    if file is None:
        return wall_clock
    path = Path(file)
    return lambda: int(path.read_text(encoding="ascii"))


class ComparedClock:
    """A clock compared with its reference.

    Parameters
    ----------
    clock : the clock of this machine
    most : the largest difference that is none, in milliseconds; never more than what the learner accepts in progress
    report : called with a sentence while the two differ, and with an empty one when they agree
    steady : a clock that is never set

    Examples
    --------
    >>> wall, steady = [5_000_000], [0]
    >>> clock = ComparedClock(lambda: wall[0], most=60_000, steady=lambda: steady[0])
    >>> wall[0] += 3_600_000  # a step by an hour
    >>> clock.earlier(), clock.later()
    (5000000, 8600000)
    >>> clock.confirm(8_600_010, written_at=5_010_000)  # a broker's clock shows the new time, too
    True
    >>> clock.earlier()
    8600000
    """

    def __init__(
        self,
        clock: Clock,
        *,
        most: int = MAX_PROGRESS_LEAD,
        report: Callable[[str], None] = lambda sentence: None,
        steady: Clock = steady_clock,
    ) -> None:
        self._clock = clock
        self._most = min(most, MAX_PROGRESS_LEAD)
        self._report = report
        self._steady = steady
        self._offset = clock() - steady()
        self._is_brokers = self._is_confirmed = False

    def __call__(self) -> int:
        """Return what the clock of this machine shows."""
        return self._clock()

    def earlier(self) -> int:
        """Return the time up to which progress may be reported."""
        now, reference = self._clock(), self._offset + self._steady()
        lead = now - reference
        if abs(lead) <= self._most:
            self._report("")
            return now
        other = "the broker's" if self._is_brokers else "its own course since it last agreed with a record"
        self._report(f"this clock is {abs(lead) / 1000:.0f} s {'ahead of' if lead > 0 else 'behind'} {other}")
        return min(now, reference)

    def later(self) -> int:
        """Return the time from which on the future begins."""
        return max(self._clock(), self._offset + self._steady())

    def latest(self) -> int:
        """Return the latest timestamp that a record may have."""
        return self.later() + (0 if self._is_confirmed else UNCONFIRMED)

    def confirm(self, stamp: int, *, written_at: int) -> bool:
        """Take the broker's time of a progress record; return whether the learner accepts a record of `written_at`."""
        self._offset, self._is_brokers, self._is_confirmed = stamp - self._steady(), True, True
        return written_at <= stamp + MAX_PROGRESS_LEAD

    def witness(self, timestamps: Sequence[int]) -> None:
        """Take the times of records that were read now: one that agrees with the clock confirms it."""
        now = self._clock()
        if not self._is_brokers and any(abs(now - timestamp) <= self._most for timestamp in timestamps):
            self._offset, self._is_confirmed = now - self._steady(), True
