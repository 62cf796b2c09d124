"""A session that a worker answered before it crashed, planned again under a version that came late."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.stream import scenes
from worker.stream import table
from worker.stream.parameters import Parameters
from worker.stream.serving import Serving
from worker.stream.topology import Record
from worker.stream.versions import KEPT, Versions

ARRIVAL = 10_000
ZERO = scenes.parameters(repeats=False)
#: Version 1 has other rewards, so another order. It should have served the arrival, but was published after it.
ONE = replace(
    ZERO,
    version=1,
    effective_at=ARRIVAL - 1,
    arms=tuple(replace(arm, reward=reward) for arm, reward in zip(ZERO.arms, (5.0, 2.0, 1.0), strict=True)),
)
LATE, IN_TIME = ARRIVAL + 300, ARRIVAL - 5_000


def worker(*known: Parameters, published_at: int = LATE, first: Parameters = ZERO) -> Serving:
    versions = Versions(first)
    for parameters in known:
        versions.learn(parameters, published_at=published_at)
    return Serving(versions, topics=scenes.TOPICS)


def arrival(session: str = "s", offset: int = 0) -> Record:
    return scenes.arrival(session, at=ARRIVAL)._replace(offset=offset)


def test_a_session_that_another_version_may_have_served_is_answered_and_journaled_as_uncertain() -> None:
    shown = scenes.decisions(worker().handle([arrival()]))[0]["slate"]
    second = worker(ONE)
    second.take_over(0, 1)
    emits = second.handle([arrival()])
    (fact,), (decision,) = scenes.facts(emits), scenes.decisions(emits)
    assert (fact["uncertain"], fact["parameters_version"]) == (True, 1)
    assert fact["slate"] == decision["slate"] != shown
    assert len(emits.changelog) == 1
    scenes.assert_balanced(emits.tally, second)


def test_the_mark_is_there_again_whenever_the_arrival_comes_again_before_the_end_of_the_takeover() -> None:
    second = worker(ONE)
    second.take_over(0, 1)
    changelog = second.handle([arrival()]).changelog
    for owner in (second, worker(ONE)):
        if owner is not second:
            owner.restore(scenes.stored(changelog))
            owner.take_over(0, 1)
        again = owner.handle([arrival()])
        assert [fact.get("uncertain") for fact in scenes.facts(again)] == [True]
        assert again.tally.repeated == 1


def test_a_plan_in_the_table_is_no_proof_because_a_worker_that_was_paused_may_have_put_it_there() -> None:
    changelog = worker().handle([arrival()]).changelog
    second = worker(ONE)
    second.restore(scenes.stored(changelog))
    second.take_over(0, 1)
    (fact,) = scenes.facts(second.handle([arrival()]))
    assert (fact["uncertain"], fact["parameters_version"]) == (True, 0)


@pytest.mark.parametrize(("published_at", "end"), [(IN_TIME, 1), (LATE, 0)])
def test_a_version_in_time_and_an_arrival_after_the_takeover_leave_no_doubt(published_at: int, end: int) -> None:
    second = worker(ONE, published_at=published_at)
    second.take_over(0, end)
    emits = second.handle([arrival()])
    (fact,) = scenes.facts(emits)
    assert "uncertain" not in fact
    assert fact["parameters_version"] == 1


def test_an_arrival_before_all_versions_that_are_kept_is_uncertain() -> None:
    second = worker(*(replace(ONE, version=number, effective_at=ARRIVAL + number) for number in range(1, KEPT + 1)))
    second.take_over(0, 1)
    assert scenes.facts(second.handle([arrival()]))[0]["uncertain"]


def test_of_a_long_backlog_only_the_beginning_can_have_been_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "MOST_REPEATED", 2)
    second = worker(ONE)
    second.take_over(5, 100)
    facts = scenes.facts(second.handle([arrival("a", 6), arrival("b", 7)]))
    assert [fact.get("uncertain") for fact in facts] == [True, None]
