"""The learner by itself, against a loop that only decodes the same facts.

The journal is that of the embedded runner: whole sessions with their feedback, and the progress of every partition each
second. Progress at the end closes the last windows, so that every session is folded. As in the learner process, records
come in polls, and the garbage collector runs rarely.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec

from worker.bench.figures import Figure, medians
from worker.runtime.memory import collect_garbage_rarely
from worker.stream.encoding import encode_journal
from worker.stream.events import JournalEvent, Opened, Progress
from worker.stream.learner import Learner
from worker.stream.settings import Arm, LearningSettings

POLLED = 5_000  # records of one poll, as in the learner process
#: The bar: so many facts a second on a quiet core, or this share of the rate of only decoding them.
LEAST_FACTS, LEAST_SHARE = 200_000, 0.25
FIGURES = 6  # number of figures that `measure_learner` yields

_decode = msgspec.json.Decoder(JournalEvent).decode


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedJournal:
    """The journal of a run, with offsets and timestamps, and the settings and arms that it is folded under."""

    settings: LearningSettings
    arms: Sequence[Arm]
    records: list[tuple[int, bytes, int]]

    @classmethod
    def closed(cls, values: Sequence[bytes], settings: LearningSettings, arms: Sequence[Arm]) -> RecordedJournal:
        """Return a journal at whose end all windows are closed."""
        reports = [event for event in map(_decode, values) if isinstance(event, Progress)]
        end = max(event.time for event in reports) + settings.window + settings.grace
        partitions = max(event.partitions for event in reports)
        last = [Progress(partition=n, partitions=partitions, time=end) for n in range(partitions)]
        written = [*values, *map(encode_journal, last)]
        return cls(settings=settings, arms=arms, records=[(n, value, end) for n, value in enumerate(written)])

    @property
    def sessions(self) -> int:
        """The number of sessions."""
        return sum(isinstance(_decode(value), Opened) for _, value, _ in self.records)

    def fold(self, *, with_episodes: bool = True) -> Learner:
        """Fold it; return the learner."""
        learner = Learner(self.settings, self.arms, with_episodes=with_episodes)
        for first in range(0, len(self.records), POLLED):
            learner.handle(self.records[first : first + POLLED])
        return learner

    def decode(self) -> None:
        """Only decode it."""
        for _, value, _ in self.records:
            _decode(value)


def measure_learner(additive: RecordedJournal, personal: RecordedJournal, *, rounds: int) -> Iterator[Figure]:
    """Yield the figures of the learner."""
    with _garbage_collected_rarely():
        seconds = medians(
            {
                "decoding": additive.decode,
                "learner": additive.fold,
                "no episodes": lambda: additive.fold(with_episodes=False),
                "personal": personal.fold,
            },
            rounds=rounds,
        )
    facts, sessions = len(additive.records), additive.sessions
    rate, decoded = facts / seconds["learner"], facts / seconds["decoding"]
    least = min(LEAST_FACTS, LEAST_SHARE * decoded)
    windows = additive.fold(with_episodes=False).current.folds
    detail = f"additive, {facts:,} facts of {sessions:,} sessions, {windows} windows"
    yield Figure("learner", rate, "facts/s", least=least, detail=detail)
    yield Figure("learner, in sessions", sessions / seconds["learner"], "sessions/s", detail="the same")
    yield Figure(
        "learner without episodes",
        facts / seconds["no episodes"],
        "facts/s",
        detail=f"{sessions / seconds['no episodes']:,.0f} sessions/s",
    )
    yield Figure("only decoding", decoded, "facts/s", detail="msgspec, the same facts")
    yield Figure("learner / only decoding", rate / decoded, "×", detail="in facts/s")
    yield Figure("learner, personal", len(personal.records) / seconds["personal"], "facts/s", detail="with episodes")


@contextmanager
def _garbage_collected_rarely() -> Iterator[None]:
    threshold = gc.get_threshold()
    collect_garbage_rarely()
    try:
        yield
    finally:
        gc.set_threshold(*threshold)
        gc.unfreeze()
