"""Records taken in bulk, against the learner that takes them one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import worker.stream.learner as learner_module
import worker.stream.windows as windows_module
from tests.stream.one_by_one import Closed, LearnerOneByOne, WindowsOneByOne
from tests.stream.scenes import feedback, opened
from tests.stream.test_hostile_journal import ARMS, SETTINGS, journals
from tests.stream.test_windows import EVENTS, TIMEOUT, WINDOW
from worker.stream.encoding import encode_episode, encode_journal
from worker.stream.events import Opened, Progress
from worker.stream.joining import AnswerColumns
from worker.stream.learner import JournalRecord, Learner, Outcome
from worker.stream.version_records import encode_parameters
from worker.stream.windows import OpenWindows

# ── windows ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=200)
@given(EVENTS, st.lists(st.integers(1, 6)), st.booleans(), st.sampled_from([WINDOW, 350, 700, 2_500]))
def test_windows_filled_in_bulk_close_as_those_filled_one_by_one(
    events: list[Any], sizes: list[int], whole_slates: bool, length: int
) -> None:
    fast, slow = OpenWindows(window=WINDOW), WindowsOneByOne(window=WINDOW)
    numbered = list(enumerate([*events, opened(arrived_at=1_200)]))

    def in_bulk(records: Sequence[Any]) -> int:
        facts = [record for record in records if isinstance(record[1], Opened)]
        answers = [record for record in records if not isinstance(record[1], Opened)]
        late = fast.open_all([offset for offset, _ in facts], [event for _, event in facts])
        return late + fast.answer_all([offset for offset, _ in answers], [event for _, event in answers])

    def one_by_one(records: Sequence[Any]) -> int:
        return sum(
            not (slow.open(offset, event) if isinstance(event, Opened) else slow.answer(offset, event))
            for offset, event in records
        )

    def close(end: int) -> None:
        how = {"session_timeout": TIMEOUT, "whole_slates": whole_slates}
        assert Closed.of(fast.close(end, **how)) == Closed.of(slow.close(end, **how))

    for size in [*sizes, len(numbered)]:
        assert in_bulk(numbered[:size]) == one_by_one(numbered[:size])
        assert (fast.needed_from, fast.sessions) == (slow.needed_from, slow.sessions)
        del numbered[:size]
        if fast.due(WINDOW):
            close(WINDOW)
    fast.resize(length)
    slow.resize(length)
    while due := fast.due(10_000):
        assert (due, fast.needed_from) == (slow.due(10_000), slow.needed_from)
        close(due[0])
    assert not slow.due(10_000)
    assert not fast.answers


def test_repeated_feedback_takes_no_memory_beyond_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows_module, "LEAST_REPEATED", 100)
    windows = OpenWindows(window=WINDOW)
    windows.open(0, opened())
    reports = [feedback(position, "abc"[position - 1], False) for position in (1, 2, 3)]
    for offset in range(1, 1_000):
        windows.answer_all([offset] * 3, reports)
        assert windows.answers <= 110
    assert windows.close(WINDOW, session_timeout=TIMEOUT, whole_slates=False).arms == ["a", "b", "c"]


def test_columns_without_repeated_records_have_one_of_each() -> None:
    columns = AnswerColumns()
    columns.extend(["s", "t", "s"], [1, 2, 1], [1, 1, 1], ["a", "b", "a"], [True, False, True])
    columns.drop_repeated()
    assert list(columns) == [("s", 1, 1, "a", True), ("t", 2, 1, "b", False)]


# ── the learner ──────────────────────────────────────────────────────────────────────────────────────────────────────


def untidy(seed: int) -> list[JournalRecord]:
    """Return a journal of absurd records with times, gaps, repeated offsets and records out of order."""
    random = Random(seed)
    records: list[JournalRecord] = []
    offset = 0
    for _, value in journals(seed):
        offset += random.choice((1, 1, 1, 1, 2, 7))
        timestamp = random.choice((0, 0, 0, 5, 3_000, 10_000_000))
        records.append((offset, value, timestamp) if timestamp else (offset, value))
        if random.random() < 0.1:
            records.append(random.choice(records))
    return records


def results(outcomes: list[Outcome]) -> list[Any]:
    return [
        (
            [encode_parameters(version) for version in outcome.versions],
            [encode_episode(episode) for episode in outcome.episodes],
            outcome.refusals,
            outcome.tags,
            outcome.late,
            list(outcome.troubles),
        )
        for outcome in outcomes
    ]


def run(kind: type[Learner], records: list[JournalRecord], sizes: list[int], **more: Any) -> list[Outcome]:
    learner = kind(SETTINGS, ARMS, **more)
    outcomes = [learner.begin()]
    at = 0
    for size in [*sizes, len(records)]:
        outcomes.append(learner.handle(iter(records[at : at + size])))
        at += size
    return outcomes


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.lists(st.integers(0, 40), max_size=6), st.sampled_from([1, 2, 7, 1024]))
def test_any_journal_gives_the_same_in_bulk_and_one_by_one(seed: int, sizes: list[int], at_once: int) -> None:
    records = untidy(seed)
    shorter = {3: replace(SETTINGS, window=70), 4: replace(SETTINGS, window=210)}
    with patch.object(learner_module, "AT_ONCE", at_once):
        fast = run(Learner, records, sizes, made_under=shorter)
        slow = run(LearnerOneByOne, records, sizes, made_under=shorter)
        assert results(fast) == results(slow)
        versions = [version for outcome in fast for version in outcome.versions]
        resumed = versions[: 1 + seed % len(versions)]
        assert results(run(Learner, records, sizes, history=resumed, made_under=shorter)) == results(
            run(LearnerOneByOne, records, sizes, history=resumed, made_under=shorter)
        )


def test_a_fact_that_raises_costs_itself_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    pack = windows_module.pack_context

    def raising(context: tuple[float, ...]) -> bytes:
        if context == (6.0, 6.0):
            raise ZeroDivisionError("as a test")
        return pack(context)

    monkeypatch.setattr(windows_module, "pack_context", raising)
    facts = [opened(f"s{n}", context=(float(n), float(n))) for n in range(9)]
    answers = [feedback(1, "a", n % 2 == 0, session_id=f"s{n}") for n in range(9)]
    values = [*map(encode_journal, facts), b"{", *map(encode_journal, answers), progress(1_000)]
    outcome = Learner(SETTINGS, ARMS).handle(enumerate(values))
    assert [episode.sessions for episode in outcome.episodes] == [8]
    assert [(kind, times) for kind, times, _ in outcome.troubles] == [("fold-passed-over", 2)]
    (_, _, example), *_ = outcome.troubles
    assert example.startswith("journal offset 9: "), "in the order of the journal"


def progress(time: int) -> bytes:
    return encode_journal(Progress(partition=0, partitions=1, time=time))


def test_the_longest_slate_takes_memory_for_itself_alone() -> None:
    windows = OpenWindows(window=WINDOW)
    windows.open(0, opened("long", slate=("a",) * 100_000))
    windows.open_all(range(1, 5_001), [opened(f"s{n}") for n in range(5_000)])
    window = windows.close(WINDOW, session_timeout=TIMEOUT, whole_slates=False)
    assert window.slates.codes.nbytes < 2_000_000
    assert window.slates.indices(np.array([1, 2]), {"b": 5}).tolist() == [[-1, 5, -1]] * 2
