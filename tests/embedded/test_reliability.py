"""The embedded runner under faults: disorder, duplicates, crashes, poison, forged feedback."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tests.embedded.crashes import through_crashes
from tests.embedded.traffic import ARMS, SECOND, START, Sent, arrivals, deliver, finish, settings
from worker.embedded.runner import Embedded
from worker.embedded.state import StateFolder
from worker.metrics import imbalances
from worker.secret import Secret
from worker.stream.events import Command
from worker.stream.parameters import Parameters
from worker.stream.topology import Emits, Record, Tally

Golden = tuple[list[Sent], str, int]
SECRET = Secret(b"a secret of enough bytes")


def run(sent: list[Sent], *, partitions: int = 4, live: bool = False, **more: Any) -> Embedded:
    runner = Embedded(settings(), ARMS, partitions=partitions, **more)
    deliver(runner, sent, live=live)
    finish(runner)
    return runner


@pytest.fixture(scope="module")
def golden() -> Golden:
    """An undisturbed run: the records sent, and hash and number of the last version."""
    runner = Embedded(settings(), ARMS, partitions=4)
    sent = deliver(runner, arrivals(300, seconds=60), live=True)
    finish(runner)
    newest = runner.versions.newest
    assert newest.version >= 6
    return sent, newest.sha256, newest.version


def balanced(tally: Tally, runner: Embedded) -> None:
    counts = (sum(task.open_sessions for task in runner.tasks), sum(task.parked for task in runner.tasks))
    assert set(imbalances(tally, *counts).values()) == {0}


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
def test_disorder_and_duplicates_leave_one_hash(golden: Golden, seed: int) -> None:
    sent, sha256, _ = golden
    runner = run(untidy(sent, seed), partitions=1 + seed % 5)
    assert runner.versions.newest.sha256 == sha256
    balanced(runner.tally, runner)
    assert runner.tally.opened == 300
    assert all(not task.table for task in runner.tasks)


@pytest.mark.parametrize("how", [{"partitions": 1}, {"partitions": 4}, {"partitions": 12}, {"batch": 1}], ids=str)
def test_the_number_of_partitions_and_the_size_of_batches_leave_one_hash(golden: Golden, how: dict[str, int]) -> None:
    sent, sha256, version = golden
    newest = run(sent, **how).versions.newest
    assert (newest.sha256, newest.version) == (sha256, version)


@pytest.mark.parametrize("most", [1, 7, 60])
def test_without_room_every_arrival_is_answered_and_the_rest_is_learned(golden: Golden, most: int) -> None:
    sent, _, _ = golden
    opened, answered = set[str](), set[str]()

    def tap(record: Record, _: object) -> None:
        if record.topic in ("ads.journal", "ads.decisions"):
            body = orjson.loads(record.value or b"")
            if body.get("kind", "opened") == "opened":
                (answered if record.topic == "ads.decisions" else opened).add(body["session_id"])

    runner = run(sent, max_open_sessions=most, tap=tap)
    assert {one.session for one in sent} - opened <= answered
    assert 0 < runner.tally.opened == len(opened) < 300
    assert runner.tally.opened + runner.tally.unremembered == 300
    balanced(runner.tally, runner)
    assert runner.versions.newest.observations > 0
    assert all(not task.table for task in runner.tasks)


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
        assert version.model.smallest_eigenvalue > 0
    balanced(runner.tally, runner)


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


def test_every_unusable_record_becomes_one_dead_letter_and_changes_nothing_else(golden) -> None:
    sent, sha256, _ = golden
    letters: list[bytes | None] = []

    def tap(record: Record, headers: Any) -> None:
        if record.topic == "ads.dead-letters":
            letters.append(record.value)

    bad = list(poison(500))
    generator = np.random.default_rng(1)
    times = [sent[i].at for i in generator.integers(0, len(sent), len(bad)).tolist()]
    mixed = sent + [
        Sent(at, topic, f"p{i}", value) for i, (at, (topic, value)) in enumerate(zip(times, bad, strict=True))
    ]
    runner = run(mixed, tap=tap)
    assert runner.versions.newest.sha256 == sha256
    assert sorted(letters, key=repr) == sorted((value for _, value in bad), key=repr)
    balanced(runner.tally, runner)


# ── restarts at any write ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("seed", range(12))
def test_a_crash_before_or_after_any_commit_leaves_the_same_versions(golden: Golden, tmp_path: Path, seed: int) -> None:
    sent, sha256, version = golden
    runner = through_crashes(tmp_path, settings(), sent, seed)
    assert (runner.versions.newest.version, runner.versions.newest.sha256) == (version, sha256)
    balanced(runner.tally, runner)


@pytest.mark.parametrize(("before", "after"), [(3, 5), (5, 2)])
def test_sessions_and_parameters_survive_a_restart(golden: Golden, tmp_path: Path, before: int, after: int) -> None:
    sent, sha256, _ = golden
    half = START + 30 * SECOND
    with StateFolder(tmp_path) as state:
        first = Embedded(settings(), ARMS, partitions=before, state=state)
        deliver(first, [one for one in sent if one.at < half])
        held = {name: session for task in first.tasks for name, session in task.table.items()}
    assert held
    with StateFolder(tmp_path) as state:
        second = Embedded(settings(), ARMS, partitions=after, state=state)
        assert {name: session for task in second.tasks for name, session in task.table.items()} == held
        assert second.versions.newest.sha256 == first.versions.newest.sha256
        deliver(second, [one for one in sent if one.at >= half])
        finish(second)
        assert second.versions.newest.sha256 == sha256
        balanced(second.tally, second)


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


def test_every_arrival_is_answered_before_any_parameters_were_learned() -> None:
    users = arrivals(50, seconds=5)
    assert len(answered(Embedded(settings(), ARMS), users)) == 50


def test_every_arrival_is_answered_while_learning_is_frozen_or_dead() -> None:
    runner = Embedded(settings(), ARMS)
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


# ── together ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class Batches:
    """Keeps the numbers of partitions and of records of every step."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int]] = []

    def batches(self, emits: Sequence[Emits], records: int, seconds: float) -> None:
        self.steps.append((len(emits), records))

    def episode(self, *_: Any) -> None: ...

    def version(self, *_: Any) -> None: ...

    def late(self, *_: Any) -> None: ...


def test_few_records_of_many_partitions_are_one_step_and_many_are_steps_of_at_most_a_batch() -> None:
    seen = Batches()
    runner = Embedded(settings(), ARMS, partitions=4, batch=100, observers=[seen])
    assert len(answered(runner, arrivals(60, seconds=5))) == 60
    assert seen.steps == [(4, 60)]
    seen.steps.clear()
    assert len(answered(runner, arrivals(1_000, seconds=5, seed=1))) == 1_000
    assert sum(records for _, records in seen.steps) == 1_000
    assert max(records for _, records in seen.steps) == 100
    assert runner.tally.arrivals == runner.tally.opened == 1_060
    balanced(runner.tally, runner)


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
