"""The embedded runner under faults: disorder, duplicates, poison, forged feedback."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tests.embedded.traffic import ARMS, SECOND, START, Sent, arrivals, deliver, finish, settings
from worker.embedded.runner import Embedded
from worker.secret import Secret
from worker.stream.events import Command
from worker.stream.parameters import Parameters
from worker.stream.topology import Record

SECRET = Secret(b"a secret of enough bytes")


class Run(NamedTuple):
    """A run to its end: what was sent, and what was written by topic."""

    runner: Embedded
    sent: list[Sent]
    records: dict[str, list[bytes | None]]

    @property
    def newest(self) -> Parameters:
        return self.runner.versions.newest

    def bodies(self, topic: str, kind: str | None = None) -> list[dict[str, Any]]:
        bodies = [orjson.loads(value or b"") for value in self.records[topic]]
        return [body for body in bodies if kind is None or body["kind"] == kind]

    def facts(self, kind: str) -> set[bytes]:
        return {value for value in self.records["ads.journal"] if value and orjson.loads(value)["kind"] == kind}


def run(sent: list[Sent], *, live: bool = False, **more: Any) -> Run:
    records = defaultdict[str, list[bytes | None]](list)

    def tap(record: Record, _: object) -> None:
        records[record.topic].append(record.value)

    runner = Embedded(settings(), ARMS, **{"partitions": 4, "tap": tap, **more})
    delivered = deliver(runner, sent, live=live)
    finish(runner)
    return Run(runner, delivered, records)


@cache
def undisturbed() -> Run:
    """Return the run with which those that are disturbed are compared."""
    found = run(arrivals(300, seconds=60), live=True)
    assert found.newest.version >= 6
    return found


def assert_same(newest: Parameters, golden: Run) -> None:
    assert (newest.version, newest.sha256) == (golden.newest.version, golden.newest.sha256)


def assert_balanced(runner: Embedded) -> None:
    assert set(runner.tally.imbalances(runner.tasks).values()) == {0}


def untidy(sent: list[Sent], seed: int) -> list[Sent]:
    """The same records in any order within lateness, almost a third of them twice."""
    generator = np.random.default_rng(seed)
    late = generator.integers(0, settings().lateness - SECOND, len(sent)).tolist()
    moved = [replace(one, at=one.at + delay) for one, delay in zip(sent, late, strict=True)]
    twice = [one for one in sent if generator.random() < 0.3]
    again = generator.integers(0, settings().lateness - SECOND, len(twice)).tolist()
    return moved + [replace(one, at=one.at + delay) for one, delay in zip(twice, again, strict=True)]


# ── order, repetition, partitions, accounting ────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("seed", range(50))
def test_disorder_and_duplicates_leave_one_hash(seed: int) -> None:
    golden = undisturbed()
    again = run(untidy(golden.sent, seed), partitions=1 + seed % 5)
    assert_same(again.newest, golden)
    assert again.facts("opened") == golden.facts("opened")
    assert again.facts("feedback") == golden.facts("feedback")
    assert_balanced(again.runner)
    assert again.runner.tally.opened == 300
    assert all(not task.table for task in again.runner.tasks)


@pytest.mark.parametrize("partitions", [1, 12])
def test_the_number_of_partitions_leaves_one_hash(partitions: int) -> None:
    golden = undisturbed()
    assert_same(run(golden.sent, partitions=partitions).newest, golden)


@pytest.mark.parametrize("most", [1, 7, 60])
def test_without_room_every_arrival_is_answered_and_the_rest_is_learned(most: int) -> None:
    sent = undisturbed().sent
    found = run(sent, max_open_sessions=most)
    opened = {fact["session_id"] for fact in found.bodies("ads.journal", "opened")}
    answered = {decision["session_id"] for decision in found.bodies("ads.decisions")}
    assert {one.session for one in sent} - opened <= answered
    tally = found.runner.tally
    assert 0 < tally.opened == len(opened) < 300
    assert tally.opened + tally.unremembered == 300
    assert_balanced(found.runner)
    assert found.newest.observations > 0
    assert all(not task.table for task in found.runner.tasks)


# ── the model is never corrupt ───────────────────────────────────────────────────────────────────────────────────────

numbers = st.one_of(
    st.sampled_from([0.0, -0.0, 1e-300, 5e-324, 1e300, -1e300, float("inf"), float("nan"), 577.0, -577.0, 1.0]),
    st.floats(allow_nan=True, allow_infinity=True),
)


@hypothesis_settings(max_examples=60, deadline=None)
@given(
    contexts=st.lists(st.lists(numbers, min_size=0, max_size=5), min_size=1, max_size=12),
    estimator=st.sampled_from(["laplace", "newton", "paper"]),
    same=st.booleans(),
)
def test_every_version_is_finite_and_positive_definite_whatever_the_input(contexts, estimator, same) -> None:
    runner = Embedded(settings(estimator=estimator, window=2 * SECOND), ARMS, partitions=2)
    sent = []
    for i, context in enumerate(contexts * 3):
        at = START + i * 400
        body = {"session_id": f"s{i}", "occurred_at": at, "context": contexts[0] if same else context}
        sent.append(Sent(at, "arrivals", f"s{i}", orjson.dumps(body)))
        for position in (1, 2, 3):
            for arm in ARMS:
                feedback = {"session_id": f"s{i}", "occurred_at": at, "position": position, "arm": arm.arm}
                sent.append(Sent(at, "clicks", f"s{i}", orjson.dumps({**feedback, "clicked": position == 3})))
    deliver(runner, sent)
    finish(runner)
    for version in runner.versions.history:
        assert all(np.isfinite(array).all() for array in version.model.pack().values())
        assert (version.model.widths(np.zeros((1, version.model.dim)))[0] > 0).all()
    assert_balanced(runner)


# ── poison ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def poison(count: int) -> Iterator[tuple[str, bytes | None]]:
    """Bad records of every kind."""
    good = {"session_id": "p", "occurred_at": START, "context": [0.0, 0.0, 0.0]}
    feedback = {"session_id": "user-0-0", "occurred_at": START, "position": 1, "arm": "ad-0", "clicked": True}
    arrivals: list[Any] = [
        *(None, b"", b"\xff\xfe", b"[" * 5_000, b'{"session_id":"' + b"x" * 70_000 + b'"}'),
        b'{"session_id":"p","occurred_at":1,"context":[NaN,0,0]}',
        *(orjson.dumps({**good, "context": context}) for context in ([0.0], [1e9, 0.0, 0.0])),
        *(orjson.dumps({**good, "occurred_at": time}) for time in (START * 2, -1)),
        orjson.dumps({**good, "session_id": ""}),
    ]
    clicks: list[Any] = [
        *(None, b"null"),
        *(orjson.dumps({**feedback, "position": position}) for position in (0, 99)),
        orjson.dumps({**feedback, "arm": "no such ad"}),
        orjson.dumps({**feedback, "clicked": "yes"}),
        orjson.dumps({**feedback, "occurred_at": START * 2}),
    ]
    kinds = [("arrivals", value) for value in arrivals] + [("clicks", value) for value in clicks]
    for i in range(count):
        yield kinds[i % len(kinds)]


def test_every_unusable_record_becomes_one_dead_letter_and_changes_nothing_else() -> None:
    golden = undisturbed()
    bad = list(poison(500))
    places = np.random.default_rng(1).integers(0, len(golden.sent), len(bad)).tolist()
    mixed = golden.sent + [
        Sent(golden.sent[place].at, topic, f"p{i}", value)
        for i, (place, (topic, value)) in enumerate(zip(places, bad, strict=True))
    ]
    found = run(mixed)
    assert_same(found.newest, golden)
    assert sorted(found.records["ads.dead-letters"], key=repr) == sorted((value for _, value in bad), key=repr)
    assert_balanced(found.runner)


# ── always serves ────────────────────────────────────────────────────────────────────────────────────────────────────


def answered(runner: Embedded, sent: list[Sent]) -> set[str]:
    names = set()
    for one in sent:
        runner.send(runner.topics.arrivals, one.value, key=one.session.encode(), timestamp=one.at)
    for _, value in runner.pump():
        decision = orjson.loads(value)
        assert decision["arm"] is not None
        names.add(decision["session_id"])
    return names


def test_every_arrival_is_answered_while_learning_is_frozen_or_dead() -> None:
    runner = Embedded(settings(), ARMS)
    assert len(answered(runner, arrivals(50, seconds=5, seed=3))) == 50  # before any parameters were learned
    deliver(runner, arrivals(100, seconds=20), live=True)
    runner.order(Command(action="freeze"))
    version = runner.versions.newest.version
    deliver(runner, [replace(one, at=one.at + 30 * SECOND) for one in arrivals(100, seconds=20, seed=5)], live=True)
    finish(runner)
    assert runner.versions.newest.version == version
    late = [
        replace(one, at=runner.time, value=orjson.dumps({**orjson.loads(one.value), "occurred_at": runner.time}))
        for one in arrivals(40, seconds=1, seed=9)
    ]
    assert len(answered(runner, late)) == 40


# ── forged feedback ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_forged_feedback_does_not_train_the_model() -> None:
    def signed(forge: bool) -> Parameters:
        runner = Embedded(settings(), ARMS, secret=SECRET, partitions=2)
        clock = START
        for one in arrivals(120, seconds=20):
            clock = max(clock, one.at)
            runner.send(runner.topics.arrivals, one.value, key=one.session.encode(), timestamp=one.at)
            for key, value in runner.pump():
                decision = orjson.loads(value)
                body = {
                    "session_id": decision["session_id"],
                    "occurred_at": decision["arrived_at"] + 10,
                    "position": 1,
                    "arm": decision["arm"],
                    "clicked": decision["session_id"].endswith("7"),
                }
                click, token = body | {"clicked": True}, {"token": decision["tokens"][0]}
                forged = [
                    click,
                    click | {"token": "1.AAAAAAAAAAAAAAAAAAAAAA"},
                    click | {"position": 2, "arm": decision["slate"][1]} | token,
                    click | {"occurred_at": decision["arrived_at"] + 8_001} | token,
                ]
                for feedback in (forged if forge else []) + [body | token]:
                    runner.send(runner.topics.clicks, orjson.dumps(feedback), key=key, timestamp=clock + 9_000)
            runner.pump()
        runner.advance(clock)
        finish(runner)
        return runner.versions.newest

    honest, attacked = signed(False), signed(True)
    assert honest.observations > 0
    assert attacked.sha256 == honest.sha256
