"""A session that a worker answered before it crashed, planned again under a version that came late."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.stream import scenes
from worker.stream import replanning
from worker.stream.decoding import decode_journal
from worker.stream.events import FeedbackFact, Opened
from worker.stream.parameters import Parameters
from worker.stream.serving import Serving
from worker.stream.topology import Emits, Record
from worker.stream.versions import Versions
from worker.stream.windows import OpenWindows

ARRIVAL, WINDOW = 10_000, 60_000
ZERO = scenes.parameters(repeats=False)
#: Version 1 has other rewards, so another order. It should have served the arrival, but was published after it.
ONE = replace(
    ZERO,
    version=1,
    effective_at=ARRIVAL - 1,
    arms=tuple(replace(arm, reward=reward) for arm, reward in zip(ZERO.arms, (5.0, 2.0, 1.0), strict=True)),
)
LATE, IN_TIME = ARRIVAL + 300, ARRIVAL - 5_000


def worker(*known: Parameters, published_at: int = LATE) -> Serving:
    versions = Versions(ZERO)
    for parameters in known:
        versions.learn(parameters, published_at=published_at)
    return Serving(versions, topics=scenes.TOPICS)


def arrival() -> Record:
    return scenes.arrival(at=ARRIVAL)


def facts(*emits: Emits) -> list[Opened | FeedbackFact]:
    return [decode_journal(value) for one in emits for _, value in one.journal]  # type: ignore[misc]


def slates(emits: Emits) -> dict[int, tuple[str, ...]]:
    return {fact.parameters_version: fact.slate for fact in facts(emits) if isinstance(fact, Opened)}


def first_slate() -> tuple[str, ...]:
    """Return what the user sees: the decision of a worker that crashes before anything else is durable."""
    return slates(worker().handle([arrival()]))[0]


def test_the_journal_gets_every_plan_that_the_user_may_have_seen() -> None:
    second = worker(ONE)
    second.take_over(0, 1)
    planned = slates(second.handle([arrival()]))
    assert planned.keys() == {0, 1}
    assert planned[0] == first_slate() != planned[1]


@pytest.mark.parametrize("answer", [1, 2, 3])
def test_nothing_counts_that_was_not_shown(answer: int) -> None:
    shown = first_slate()
    second = worker(ONE)
    second.take_over(0, 1)
    emits = [
        second.handle([one])
        for one in (arrival(), scenes.click(at=ARRIVAL + 9, position=answer, arm=shown[answer - 1]))
    ]
    windows = OpenWindows(window=WINDOW)
    for offset, fact in enumerate(facts(*emits)):
        assert windows.open(offset, fact) if isinstance(fact, Opened) else windows.answer(offset, fact)
    closed = windows.close(WINDOW, session_timeout=10_000, whole_slates=False)
    assert set(closed.arms) <= set(shown[:answer])
    assert (shown[answer - 1], True) in zip(closed.arms, closed.clicked, strict=True), "the click counts"


def test_a_session_whose_feedback_fits_only_the_first_plan_is_counted_once() -> None:
    shown = first_slate()
    second = worker(ONE)
    second.take_over(0, 1)
    stored = slates(second.handle([arrival()]))[1]
    (position, *_) = [at for at, (one, other) in enumerate(zip(shown, stored, strict=True), 1) if one != other]
    feedback = scenes.passed(at=ARRIVAL + 9, position=position, arm=shown[position - 1])
    tallies = [second.handle([feedback]).tally for _ in range(2)]
    assert [tally.replanned for tally in tallies] == [1, 0]
    assert [tally.dead["arm-mismatch"] for tally in tallies] == [1, 1]


def test_a_table_value_whose_other_plans_were_not_journaled_gets_them_when_its_arrival_comes_again() -> None:
    second = worker(ONE)
    second.take_over(0, 1)
    changelog = [Record(scenes.TOPICS.changelog, 0, 0, 0, *pair) for pair in second.handle([arrival()]).changelog]
    third = worker(ONE)
    third.restore(changelog)
    third.take_over(0, 1)
    assert slates(third.handle([arrival()])).keys() == {0, 1}


def test_a_version_in_time_leaves_one_plan() -> None:
    second = worker(ONE, published_at=IN_TIME)
    second.take_over(0, 1)
    assert slates(second.handle([arrival()])).keys() == {1}


def test_an_arrival_that_came_after_the_takeover_has_one_plan() -> None:
    second = worker(ONE)
    second.take_over(0, 0)
    assert slates(second.handle([arrival()])).keys() == {1}


def test_of_a_long_backlog_only_the_beginning_can_have_been_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replanning, "MOST_REPEATED", 2)
    second = worker(ONE)
    second.take_over(5, 100)
    records = [arrival()._replace(offset=offset) for offset in (6, 7)]
    assert len(slates(second.handle(records[1:]))) == 1
    assert len(slates(second.handle(records[:1]))) == 2
