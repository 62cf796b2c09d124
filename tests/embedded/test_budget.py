"""The embedded runner with a low budget of learning: one hash, whatever happens to the records."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson
import pytest

from tests.embedded.crashes import through_crashes
from tests.embedded.test_reliability import balanced, untidy
from tests.embedded.traffic import ARMS, SECOND, Sent, arrivals, deliver, finish, settings
from worker.embedded.runner import Embedded
from worker.stream.chance import ALL
from worker.stream.parameters import Parameters
from worker.stream.topology import Record

SETTINGS = settings(learn_at_most=15)


class Golden(NamedTuple):
    sent: list[Sent]
    newest: Parameters
    journal: set[bytes]
    episodes: list[dict[str, Any]]


def run(sent: list[Sent], *, live: bool = False, **more: Any) -> tuple[Embedded, Golden]:
    facts, episodes = set[bytes](), list[dict[str, Any]]()

    def tap(record: Record, _: object) -> None:
        body = orjson.loads(record.value or b"{}")
        if record.topic == "ads.journal" and body["kind"] in ("opened", "feedback"):
            facts.add(record.value or b"")
        elif record.topic == "ads.episodes":
            episodes.append(body)

    runner = Embedded(SETTINGS, ARMS, **{"partitions": 4, "tap": tap, **more})
    delivered = deliver(runner, sent, live=live)
    finish(runner)
    return runner, Golden(delivered, runner.versions.newest, facts, episodes)


@pytest.fixture(scope="module")
def golden() -> Golden:
    """An undisturbed run of 50 sessions per window."""
    runner, found = run(arrivals(300, seconds=60), live=True)
    assert found.newest.version >= 6
    assert found.newest.shares != ALL
    assert 0 < runner.tally.unjournaled < runner.tally.opened == 300
    return found


def test_about_as_many_sessions_are_learned_from_as_the_budget_has_and_all_are_counted(golden: Golden) -> None:
    assert sum(episode["sessions"] for episode in golden.episodes) == 300
    sampled = [episode for episode in golden.episodes if "learned" in episode]
    assert len(sampled) >= 3
    assert 0.4 * 15 <= np.mean([episode["learned"] for episode in sampled]) <= 2 * 15
    whole = [episode for episode in golden.episodes if "learned" not in episode]
    for name in ("displays", "explored"):
        one, other = (np.mean([e[name] / e["sessions"] for e in part]) for part in (sampled, whole))
        assert one == pytest.approx(other, rel=0.5) or name == "explored"
    assert golden.newest.expected_sessions == golden.episodes[-1]["sessions"]


@pytest.mark.parametrize("seed", range(6))
def test_disorder_and_duplicates_leave_one_hash_and_the_same_facts(golden: Golden, seed: int) -> None:
    runner, again = run(untidy(golden.sent, seed), partitions=1 + seed % 5)
    assert again.newest.sha256 == golden.newest.sha256
    # Feedback that comes before its arrival is journaled in any case.
    assert {fact for fact in again.journal if b'"opened"' in fact} == {f for f in golden.journal if b'"opened"' in f}
    assert again.journal >= golden.journal
    balanced(runner.tally, runner)
    assert runner.tally.opened == 300


@pytest.mark.parametrize("how", [{"partitions": 1}, {"partitions": 12}, {"batch": 1}], ids=str)
def test_the_number_of_partitions_and_the_size_of_batches_leave_one_hash(golden: Golden, how: dict[str, int]) -> None:
    assert run(golden.sent, **how)[1].newest.sha256 == golden.newest.sha256


def test_which_sessions_are_journaled_does_not_depend_on_their_answers(golden: Golden) -> None:
    """With other answers, the estimates differ; under equal versions, the same sessions are journaled."""
    until = golden.episodes[1]["window_end"]
    others = []
    for one in golden.sent:
        body = orjson.loads(one.value)
        if one.topic == "clicks" and body["occurred_at"] > until + 30 * SECOND:
            continue
        others.append(one)

    def opened(facts: set[bytes]) -> dict[str, int]:
        bodies = [orjson.loads(fact) for fact in facts if b'"opened"' in fact]
        return {body["session_id"]: body["parameters_version"] for body in bodies}

    ours, theirs = opened(golden.journal), opened(run(others)[1].journal)
    first = {session for session, version in ours.items() if version <= 4}
    assert {session for session, version in theirs.items() if version <= 4} == first


@pytest.mark.parametrize("seed", range(4))
def test_a_crash_before_or_after_any_commit_leaves_the_same_versions(golden: Golden, tmp_path: Path, seed: int) -> None:
    runner = through_crashes(tmp_path, SETTINGS, golden.sent, seed)
    assert runner.versions.newest.sha256 == golden.newest.sha256
