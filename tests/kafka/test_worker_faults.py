"""Workers that die, sleep, come and go, and a broker that restarts: what is learned stays the same to the bit."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.embedded.test_reliability import poison
from tests.embedded.traffic import START, arrivals
from tests.kafka.conftest import broker
from tests.kafka.fleet import Fleet, Running
from tests.kafka.golden import Golden, play
from tests.kafka.world import eventually, trim_topic

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def golden() -> Golden:
    return Golden()


@pytest.fixture
def fleet(address: str, tmp_path: Path) -> Iterator[Fleet]:
    made = Fleet(address, f"f{uuid.uuid4().hex[:8]}", tmp_path)
    made.set_clock(START)
    yield made
    made.close()


def as_golden(fleet: Fleet, golden: Golden) -> None:
    assert [version.sha256 for version in fleet.control.history()] == golden.hashes
    assert fleet.facts() == golden.facts, "what was sent is what was applied"


def learner(fleet: Fleet) -> Running:
    def learns() -> Running | None:
        return next((worker for worker in fleet.running if worker.metric("adcascade_learning") == 1), None)

    found = eventually(learns, what="a worker runs the learner")
    assert found is not None
    return found


def test_workers_killed_over_and_over_leave_the_golden_hash(fleet: Fleet, golden: Golden) -> None:
    chance = random.Random(1)
    fleet.serving()
    fleet.serving()
    kills = 0

    def kill(step: int) -> None:
        nonlocal kills
        victims = fleet.running if chance.random() < 0.3 else [chance.choice(fleet.running)]
        for victim in victims:
            victim.kill(alone=chance.random() < 0.5)
            fleet.start()
            kills += 1

    play(golden, fleet, kill)
    assert kills >= 20
    as_golden(fleet, golden)


def test_a_learner_that_sleeps_and_wakes_after_its_successor_has_gone_changes_nothing(
    fleet: Fleet, golden: Golden
) -> None:
    fleet.serving()
    fleet.serving()
    sleeper: list[Running] = []

    def disturb(step: int) -> None:
        if step == 3:
            sleeper.append(learner(fleet))
            sleeper[0].pause()
        if step == 9:
            successor = learner(fleet)
            assert successor is not sleeper[0]
            sleeper[0].resume()
            successor.kill()

    play(golden, fleet, disturb)
    as_golden(fleet, golden)


def test_a_learner_s_process_that_is_killed_is_started_again_and_ends_with_its_worker(
    fleet: Fleet, golden: Golden
) -> None:
    worker = fleet.serving()
    killed: list[int] = []

    def disturb(step: int) -> None:
        if step == 4:
            killed.append(eventually(lambda: worker.learner, what="it learns"))
            os.kill(killed[0], signal.SIGKILL)

    play(golden, fleet, disturb)
    as_golden(fleet, golden)
    assert fleet.running == [worker], "serving did not end with the learning"
    successor = eventually(lambda: worker.learner)
    assert successor not in (None, killed[0])
    worker.kill(alone=True)
    eventually(lambda: not Path(f"/proc/{successor}").exists(), what="nobody is left behind")


def test_a_journal_trimmed_too_early_stops_the_learner_but_not_the_serving(fleet: Fleet) -> None:
    first = fleet.serving()
    fleet.send(arrivals(20, seconds=1))
    eventually(lambda: len(fleet.facts()) == 20, what="there is a journal")
    first.kill()
    end = len(fleet.read(fleet.names.journal))
    asyncio.run(trim_topic(fleet.connection, fleet.names.journal, end))
    second = fleet.serving()
    eventually(lambda: "it was trimmed too early" in second.log.read_text(encoding="utf-8"))
    eventually(lambda: second.metric("adcascade_learning") == 0)
    fleet.send(arrivals(20, seconds=1, seed=1))
    eventually(lambda: len(fleet.answered()) == 40, what="serving continues")
    assert [version.version for version in fleet.control.history()] == [0]


def test_workers_that_come_and_go_leave_the_golden_hash(fleet: Fleet, golden: Golden) -> None:
    first = fleet.serving()
    stopped: list[int] = []

    def disturb(step: int) -> None:
        if step in (2, 4):
            fleet.start()
        if step == 7:
            stopped.append(first.terminate()[0])
        if step == 9:
            stopped.append(fleet.running[0].terminate()[0])

    play(golden, fleet, disturb)
    assert stopped == [0, 0]
    as_golden(fleet, golden)
    (last,) = fleet.running
    for identity in ("arrivals", "sessions", "feedback"):
        assert last.metric(f'adcascade_accounting_imbalance{{identity="{identity}"}}') == 0


def test_poison_costs_one_dead_letter_each_and_nothing_else(fleet: Fleet, golden: Golden) -> None:
    worker = fleet.serving()
    bad = [(topic, b"p%d" % number, value) for number, (topic, value) in enumerate(poison(500))]
    bad.append(("arrivals", b"huge", b" " * (5 << 20)))

    def disturb(step: int) -> None:
        fleet.send_raw((getattr(fleet.names, topic), key, value) for topic, key, value in bad[step * 50 :][:50])

    play(golden, fleet, disturb)
    as_golden(fleet, golden)
    assert fleet.running == [worker], "it was not restarted"
    letters = fleet.read(fleet.names.dead_letters)
    assert {(letter.key, letter.value) for letter in letters} == {(key, value) for _, key, value in bad}
    assert len(letters) == len(bad)
    assert all(dict(letter.headers)["adcascade.reason"] for letter in letters)


def test_a_broker_that_restarts_cleanly_and_hard_needs_nobody(golden: Golden, tmp_path: Path) -> None:
    data = str(tmp_path / "broker")
    address = broker("start", "--port", "0", "--data-dir", data)
    try:
        fleet = Fleet(address, "restarted", tmp_path)
        fleet.set_clock(START)
        try:
            worker = fleet.serving()

            def disturb(step: int) -> None:
                if step in (3, 8):
                    broker("stop", *(["--kill"] if step == 8 else []), "--data-dir", data)
                    broker("start", "--port", address.rpartition(":")[2], "--data-dir", data)

            play(golden, fleet, disturb)
            as_golden(fleet, golden)
            assert fleet.running == [worker], "the worker has lived through it"
        finally:
            fleet.close()
    finally:
        broker("stop", "--kill", "--data-dir", data)
