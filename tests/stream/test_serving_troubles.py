"""Troubles that serving reports, each with an example: dead letters, late records, silence, wrong partitions."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.stream.scenes import TOPICS, arrival, click, decisions, parameters, passed, serving
from worker.stream.contexts import pack_context
from worker.stream.features import Features
from worker.stream.serving import NO_ARRIVAL, Serving
from worker.stream.table import SessionRoom
from worker.stream.topology import Emits, Record
from worker.stream.versions import Versions


def troubles(emits: Emits) -> dict[str, tuple[int, str]]:
    return {kind: (times, example) for kind, times, example in emits.tally.troubles}


def test_a_session_with_prompt_feedback_is_no_trouble() -> None:
    task = serving()
    emits = task.handle([arrival(at=1_000)])
    (decision,) = decisions(emits)
    answered = task.handle([passed(at=2_000, arm=decision["arm"])])
    task.acknowledged(20_000)
    assert [troubles(one) for one in (emits, answered, task.handle([]))] == [{}, {}, {}]


def test_a_dead_letter_is_reported_by_place_and_reason_without_its_content() -> None:
    declared = parameters(dim=1, features=Features.of_table({"context": {"age": "number"}}))
    for value in (
        b'{"session_id": "secret", "occurred_at": "now"}',
        b'{"session_id": "secret", "occurred_at": 0, "context": {"age": 1, "secret": 2}}',
    ):
        emits = serving(declared).handle([Record(TOPICS.arrivals, 3, 7, 0, b"secret", value)])
        assert troubles(emits) == {"dead-letters": (1, "ads.arrivals, partition 3, offset 7: invalid")}


def test_feedback_that_comes_after_its_session_was_deleted_is_reported_when_it_comes() -> None:
    task = serving()
    task.handle([arrival(at=1_000)])
    task.acknowledged(20_000)
    emits = task.handle([passed(at=2_000)])
    assert troubles(emits)["late-feedback"] == (1, "7 s too late")


def test_feedback_outside_the_time_of_its_session_is_reported_with_how_far() -> None:
    task = serving()
    (decision,) = decisions(task.handle([arrival(at=10_000)]))
    early = task.handle([passed(at=6_000, arm=decision["arm"])])
    late = task.handle([click(at=25_000, arm=decision["arm"])])
    assert troubles(early) == {"late-feedback": (1, "4 s before its arrival")}
    assert troubles(late) == {"late-feedback": (1, "5 s after its end")}


def test_feedback_without_an_arrival_is_reported_when_it_expires() -> None:
    task = serving()
    assert troubles(task.handle([passed(at=2_000), click(at=2_500, position=2)])) == {}
    task.acknowledged(15_000)
    assert troubles(task.handle([])) == {"late-feedback": (2, NO_ARRIVAL)}


def test_an_arrival_whose_session_is_over_is_reported() -> None:
    task = serving()
    task.acknowledged(11_999)
    assert troubles(task.handle([arrival("timely", at=1_000)])) == {}
    task.acknowledged(15_000)
    emits = task.handle([arrival("late", at=1_000)])
    assert troubles(emits)["late-arrivals"] == (1, "a session was over for 3 s")


def test_a_session_without_any_feedback_is_reported_unless_silence_means_passed() -> None:
    for unanswered, expected in (("left", {"unanswered": (1, "")}), ("passed", {})):
        task = serving(parameters(unanswered=unanswered))
        task.handle([arrival(at=1_000)])
        task.acknowledged(15_000)
        assert troubles(task.handle([])) == expected


def test_a_batch_has_the_context_of_one_of_its_new_sessions() -> None:
    task = serving()
    assert task.handle([arrival("a", context=(0.5, -1.0))]).sample == pack_context((0.5, -1.0))
    assert task.handle([arrival("a", context=(0.5, -1.0))]).sample is None


# ── keys and partitions ──────────────────────────────────────────────────────────────────────────────────────────────


def test_feedback_whose_arrival_is_in_another_partition_of_the_worker_is_reported_without_its_session() -> None:
    room = SessionRoom()
    first, second = (Serving(Versions(parameters()), partition=p, topics=TOPICS, room=room) for p in (0, 1))
    emits = [first.handle([click("early")]), first.handle([arrival("a"), arrival("b"), arrival("early")])]
    emits += [first.handle([click("a")]), second.handle([click("lonely")])]
    assert [troubles(one) for one in emits] == [{}] * 4, "feedback in its partition, and feedback without an arrival"
    split = "the arrival of a session is in partition 0 of ads.arrivals, its feedback in partition 1 of ads.clicks. "
    advice = "Set partitioner=murmur2_random (murmur2) in both producers"
    assert troubles(second.handle([click("a"), click("b")])) == {"split-sessions": (2, split + advice)}
    first.hand_over()
    assert troubles(second.handle([click("b", position=2)])) == {}


@pytest.mark.parametrize("make", [arrival, click])
@pytest.mark.parametrize(("key", "wrong"), [(None, "no key"), (b"", "no key"), (b"s", "the key is not the session_id")])
def test_a_key_that_is_no_session_is_reported(make: Callable[[str], Record], key: bytes | None, wrong: str) -> None:
    emits = serving().handle([make(f"session-{n}")._replace(key=key, partition=1, offset=n) for n in range(30)])
    assert troubles(emits) == {"wrong-key": (30, f"{make('s').topic}, partition 1, offset 29: {wrong}")}
