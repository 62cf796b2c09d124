"""Memory: what comes in cannot take more of it than stated, measured in bytes that Python has allocated."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Sequence

import msgspec
import orjson
import pytest

from tests.stream.scenes import arrival, feedback, opened, serving, stored
from worker.stream.events import MOST_PARTITIONS, FeedbackFact, Opened, Progress, encode_event
from worker.stream.learner import Learner
from worker.stream.settings import Arm, LearningSettings
from worker.stream.windows import OpenWindows

KB = 1024
LONGEST = 128  # characters of an id


def allocated(act: Callable[[], object]) -> tuple[int, int]:
    """Return the bytes that a call leaves allocated, and the most that it had."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        kept = act()
        after, peak = tracemalloc.get_traced_memory()
        assert kept is not None, "what is measured must still be there"
        return after - before, peak - before
    finally:
        tracemalloc.stop()


def long_list(session: int) -> list[str]:
    """Return as many ids as an arrival may exclude, as long as they may be, of no arm and no other session."""
    return [f"{session}-{index}-".ljust(LONGEST, "x") for index in range(256)]


# ── the learner ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("partitions", [MOST_PARTITIONS + 1, 50_000_000, 2**53])
def test_progress_of_more_partitions_than_topics_have_is_passed_over(partitions: int) -> None:
    learner = Learner(LearningSettings(dim=1), [Arm(arm="a", reward=1.0)])
    forged = orjson.dumps({"kind": "progress", "partition": 3, "partitions": partitions, "time": 5})
    true = encode_event(Progress(partition=0, partitions=1, time=7))
    _, peak = allocated(lambda: learner.handle([(0, forged), (1, true)]))
    assert peak < 100 * KB
    assert learner.watermark.by_partition() == {0: 7}
    assert [kind for kind, *_ in learner.handle([(2, forged)]).troubles] == ["fold-passed-over"]


def test_the_most_partitions_take_little_memory() -> None:
    learner = Learner(LearningSettings(dim=1), [Arm(arm="a", reward=1.0)])
    most = encode_event(Progress(partition=0, partitions=MOST_PARTITIONS, time=5))
    left, _ = allocated(lambda: learner.handle([(0, most)]))
    assert left < 2 * KB * KB


def collected(windows: OpenWindows, facts: Sequence[Opened | FeedbackFact]) -> int:
    """Return the bytes that facts take in the windows of a learner, decoded from their records."""
    records, decode = [encode_event(fact) for fact in facts], msgspec.json.Decoder(type(facts[0])).decode

    def collect() -> OpenWindows:
        for offset, record in enumerate(records):
            fact = decode(record)
            assert windows.open(offset, fact) if isinstance(fact, Opened) else windows.answer(offset, fact)
        return windows

    return allocated(collect)[0]


def test_the_longest_exclusions_take_eight_bytes_each_in_the_learner() -> None:
    windows = OpenWindows(window=1_000)
    left = collected(windows, [opened(f"s{n}", 100, exclude=tuple(long_list(n))) for n in range(300)])
    assert left < 300 * (256 * 8 + KB) + 8 * KB * KB, "and the cache of hashes, of a fixed size"
    assert len(windows.close(1_000, session_timeout=60, whole_slates=False).plans) == 300


def test_answers_share_the_names_of_arms() -> None:
    facts = [feedback(1, "a" * LONGEST, True, n, f"s{n}") for n in range(1_000)]
    assert collected(OpenWindows(window=10_000), facts) / 1_000 < 400


# ── serving ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_longest_exclusions_take_no_memory_in_serving_and_none_in_the_changelog() -> None:
    task = serving()
    records = [arrival(f"s{n}", exclude=long_list(n)) for n in range(100)]
    emits = task.handle([arrival("first")])

    def serve() -> object:
        nonlocal emits
        emits = task.handle(records)
        emits.journal.clear()  # has the lists, until it is written
        return task

    left, _ = allocated(serve)
    assert left / 100 < 3 * KB
    assert all(value is not None and len(value) < KB for _, value in emits.changelog)


def test_a_repeated_arrival_is_recognised_by_the_digest_of_its_exclusions_after_a_restart_too() -> None:
    task, other = serving(), long_list(1)
    first = task.handle([arrival(exclude=long_list(0))])
    restarted = serving()
    restarted.restore(stored(first.changelog))
    again = restarted.handle([arrival(exclude=long_list(0))])
    assert (again.journal, again.decisions) == (first.journal, first.decisions)
    for exclude in ([], other[:1], other[:3], other, long_list(0)[::-1]):
        assert restarted.handle([arrival(exclude=exclude)]).tally.dead == {"session-reused": 1}
