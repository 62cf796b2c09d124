"""Workers are killed, paused, started and stopped, the broker restarts: the versions stay the same to the bit."""

from __future__ import annotations

import os
import random
import signal
from contextlib import closing
from pathlib import Path
from zlib import crc32

import orjson
import pytest

from tests.embedded.test_reliability import poison
from tests.embedded.traffic import SECOND, START, arrivals
from tests.kafka.conftest import OwnBroker
from tests.kafka.fleet import Fleet, Running
from tests.kafka.golden import Golden, play
from tests.programs import eventually
from worker.kafka.parameters import decoded
from worker.kafka.topics import TopicLayout, check

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def golden() -> Golden:
    return Golden()


@pytest.fixture(autouse=True)
def at_the_start(fleet: Fleet) -> None:
    fleet.set_clock(START)


def as_golden(fleet: Fleet, golden: Golden) -> None:
    assert [version.sha256 for version in fleet.control.history()] == golden.hashes
    assert fleet.facts() == golden.facts, "the facts are those of the inputs"
    published = decoded(fleet.read(fleet.names.parameters))
    contents = {(version.version, version.sha256) for version in published}
    assert len(contents) == len({number for number, _ in contents}), "a version published twice is the same"


def as_golden_but_for_stale_plans(fleet: Fleet, golden: Golden) -> None:
    """Judge a run in which a worker was paused for longer than the group waits.

    Until the group tells it so, it may fetch what came meanwhile, and serve it by the versions of before. Then a
    session has two plans, and is not learned from.
    """
    more = [orjson.loads(fact) for fact in fleet.facts() - golden.facts]
    if not more:
        as_golden(fleet, golden)
        return
    assert golden.facts <= fleet.facts(), "nothing is lost"
    assert {fact["kind"] for fact in more} == {"opened"}, "nothing is learned twice"
    assert len(fleet.control.history()) == len(golden.hashes)


def learner(fleet: Fleet) -> Running:
    def learning() -> list[Running]:
        return [worker for worker in fleet.running if worker.metric("adcascade_learning") == 1]

    return eventually(learning, what="a worker runs the learner")[0]


def test_workers_killed_again_and_again_keep_the_golden_hash(fleet: Fleet, golden: Golden) -> None:
    chance = random.Random(1)
    fleet.serving()
    fleet.serving()
    kills = 0

    def kill(step: int) -> None:
        nonlocal kills
        if step % 2:
            return  # the hostile suite kills without a pause
        victims = fleet.running if chance.random() < 0.3 else [chance.choice(fleet.running)]
        for victim in victims:
            victim.kill(alone=chance.random() < 0.5)
            fleet.start()
            kills += 1

    play(golden, fleet, kill)
    assert kills >= 10
    as_golden(fleet, golden)


def test_a_paused_learner_that_continues_after_its_successor_was_killed_changes_nothing(
    fleet: Fleet, golden: Golden
) -> None:
    fleet.serving()
    fleet.serving()
    paused: list[Running] = []

    def disturb(step: int) -> None:
        if step == 3:
            paused.append(learner(fleet))
            paused[0].pause()
        if step == 9:
            successor = learner(fleet)
            assert successor is not paused[0]
            paused[0].resume()
            successor.kill()

    play(golden, fleet, disturb)
    as_golden_but_for_stale_plans(fleet, golden)


def test_a_journal_trimmed_too_early_stops_the_learner_but_not_the_serving(fleet: Fleet) -> None:
    first = fleet.serving()
    fleet.send(arrivals(20, seconds=1))
    eventually(lambda: len(fleet.facts()) == 20, what="there is a journal")
    first.kill()
    end = len(fleet.read(fleet.names.journal))
    fleet.trim(fleet.names.journal, end)
    second = fleet.serving()
    eventually(lambda: "it was trimmed too early" in second.text)
    eventually(lambda: second.metric("adcascade_learning") == 0)
    fleet.send(arrivals(20, seconds=1, seed=1))
    eventually(lambda: len(fleet.answered()) == 40, what="serving continues")
    assert [version.version for version in fleet.control.history()] == [0]


def test_poison_costs_one_dead_letter_each_and_a_killed_learner_process_is_started_again(
    fleet: Fleet, golden: Golden
) -> None:
    worker = fleet.serving()
    bad = [(topic, b"p%d" % number, value) for number, (topic, value) in enumerate(poison(500))]
    bad.append(("arrivals", b"huge", b" " * 900_000))
    killed: list[int] = []

    def disturb(step: int) -> None:
        fleet.send_raw((getattr(fleet.names, topic), key, value) for topic, key, value in bad[step * 50 :][:50])
        if step == 4:
            killed.append(eventually(lambda: worker.learner, what="it learns"))
            os.kill(killed[0], signal.SIGKILL)

    play(golden, fleet, disturb)
    as_golden(fleet, golden)
    assert fleet.running == [worker], "it was not restarted"
    letters = fleet.read(fleet.names.dead_letters)
    assert {(letter.key, letter.value) for letter in letters} == {(key, value) for _, key, value in bad}
    assert len(letters) == len(bad)
    assert all(dict(letter.headers)["adcascade.reason"] for letter in letters)
    status, body = worker.ask("/readyz")
    assert (status, "\n- dead-letters: " in body) == (200, True)
    assert any(line["message"].startswith("trouble dead-letters") for line in worker.lines)
    successor = eventually(lambda: worker.learner)
    assert successor != killed[0]
    worker.kill(alone=True)
    eventually(lambda: not Path(f"/proc/{successor}").exists(), what="the learner process ends with its worker")


def test_split_sessions_no_room_and_garbage_progress_are_reported(fleet: Fleet) -> None:
    worker = fleet.serving("--max-open-sessions", "100")
    garbage = b'{"kind":"progress","partition":3,"partitions":50000000,"time":1}'
    fleet.send_raw([(fleet.names.journal, None, garbage)])
    sent = arrivals(140, seconds=5)
    fleet.set_clock(START + 5_000)
    # The marks of a transaction at the ends of the partitions do not hold progress back.
    fleet.send_raw([(fleet.names.arrivals, one.session.encode(), one.value) for one in sent], fleet.names.prefix)
    eventually(lambda: len(fleet.answered()) == 140, what="every arrival is answered")
    click = {"occurred_at": START + 5_000, "position": 1, "arm": "ad-0", "clicked": True}
    fleet.send_raw(
        [
            (fleet.names.clicks, one.session.encode(), orjson.dumps({"session_id": one.session, **click}))
            for one in sent[:60]
        ],
        place=lambda key, partitions: crc32(key) % partitions,
    )

    def active(kind: str, level: str = "bad") -> bool:
        return worker.metric(f'adcascade_trouble{{kind="{kind}",level="{level}"}}') == 1

    eventually(lambda: active("split-sessions") and active("too-many-sessions"))
    assert not active("wrong-key", "warn")
    status, body = worker.ask("/readyz")
    expected = "Set partitioner=murmur2_random (murmur2) in both producers"
    assert status == 200
    assert "- split-sessions: " in body
    assert expected in body
    assert any(expected in line["message"] for line in worker.lines)
    assert worker.metric('adcascade_arrivals_classified_total{class="unremembered"}') == 40
    modes = [orjson.loads(record.value)["mode"] for record in fleet.read(fleet.names.decisions)]
    assert modes.count("fallback") == 40
    fleet.set_clock(START + 60_000)
    eventually(lambda: worker.metric("adcascade_parameters_version") >= 1, what="the learner goes on")
    eventually(lambda: worker.balanced)


def test_workers_continue_after_clean_and_hard_restarts_of_the_broker(
    golden: Golden, own_broker: OwnBroker, tmp_path: Path
) -> None:
    with closing(Fleet(own_broker.address, "restarted", tmp_path)) as fleet:
        fleet.set_clock(START)
        worker = fleet.serving()

        def disturb(step: int) -> None:
            if step in (3, 8):
                own_broker.restart(*(["--kill"] if step == 8 else []))

        play(golden, fleet, disturb)
        as_golden(fleet, golden)
        assert fleet.running == [worker], "it was not restarted"


def test_a_worker_goes_on_with_a_broker_that_lost_its_disk_once_the_topics_are_there_again(
    own_broker: OwnBroker, tmp_path: Path
) -> None:
    with closing(Fleet(own_broker.address, "lost", tmp_path)) as fleet:
        fleet.set_clock(START + SECOND)
        worker = fleet.serving()
        fleet.send(arrivals(20, seconds=1))
        eventually(lambda: len(fleet.answered()) == 20, what="it serves")
        own_broker.lose_disk()
        check(fleet.connection, fleet.names, TopicLayout(partitions=4), create=True)
        fleet.send(arrivals(20, seconds=1, seed=1))
        eventually(lambda: len(fleet.answered()) == 20, what="it serves again")
        eventually(lambda: worker.ready and worker.has_version(0), what="it learns again")
        assert fleet.running == [worker], "it was not restarted"
