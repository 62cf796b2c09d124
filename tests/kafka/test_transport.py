"""Toy workers on a real broker: nothing is lost and nothing counts twice, whatever happens to them."""

from __future__ import annotations

import random
import signal
import time
import uuid
from contextlib import closing
from pathlib import Path

import orjson
import pytest

from tests.kafka.conftest import OwnBroker
from tests.kafka.world import World, eventually

pytestmark = pytest.mark.slow


def settled(world: World, *, exactly_once: bool = False) -> None:
    """Check that everything sent is processed, joined, and nothing else is there."""
    eventually(world.caught_up, what="everything is committed")
    facts = world.facts()
    assert set(facts) == world.expected_facts()
    assert world.last(world.names.changelog) == world.sent
    assert world.last(world.names.decisions) == world.sent
    assert world.progress_is_true()
    if exactly_once:
        assert len(facts) == len(set(facts))


def test_every_record_is_journalled_once_and_joined(world: World) -> None:
    world.rounds(0, 300)
    world.serving()
    world.rounds(300, 300)
    settled(world, exactly_once=True)


def test_bad_records_become_dead_letters_byte_for_byte_and_cost_nothing_else(world: World) -> None:
    names = world.names
    world.serving()
    bad = [
        (names.arrivals, b"key-1", b"\xff\x00 not json"),
        (names.clicks, None, b'{"n": 1}'),
        (names.clicks, b"k", None),
    ]
    world.send_raw(bad)
    world.send_raw([(names.arrivals, b"key-2", b'{"n": 7, "explode": true}')])
    world.rounds(0, 100)
    settled(world)
    letters = [(record.key, record.value) for record in world.read(names.dead_letters)]
    expected = [(key, value) for _, key, value in bad] + [(b"key-2", b'{"n": 7, "explode": true}')]
    assert sorted(letters, key=repr) == sorted(expected, key=repr)


def test_a_terminated_worker_finishes_its_records_and_the_next_repeats_nothing(world: World) -> None:
    first = world.serving()
    world.rounds(0, 500)
    assert first.terminate() == 0
    world.serving()
    world.rounds(500, 100)
    settled(world, exactly_once=True)


def test_the_table_of_a_killed_worker_is_restored_from_the_changelog(world: World) -> None:
    # So many that it takes a while; and the group has to wait for the dead member first.
    first = world.serving(session_timeout=5.0)
    world.send(arrivals=[(n, n) for n in range(20_000)])
    eventually(world.caught_up)
    first.kill()
    world.send(clicks=[(n, n) for n in range(0, 20_000, 10)])
    second = world.serving()
    assert second.status()["restored"] == 20_000
    settled(world)


def test_kill_9_at_random_steps_loses_nothing_and_counts_nothing_twice(world: World) -> None:
    chance = random.Random(1)
    first = 0
    for life in range(4):
        # It dies right before or after a random write, acknowledgement or commit. Keys are new in each life, so that a
        # lost record stays lost.
        worker = world.start(commit_interval=0.02, die_at=chance.randrange(2, 120))
        deadline = time.monotonic() + 120
        while worker.running:
            assert time.monotonic() < deadline, worker.tail()
            world.rounds(first, 40, keys=20, base=100 * life)
            first += 40
        assert worker.ended() == -signal.SIGKILL
    world.serving()
    settled(world)


def test_members_come_and_go_while_traffic_runs(world: World) -> None:
    world.rounds(0, 300)
    one = world.serving()
    two = world.start()
    world.rounds(300, 300)
    eventually(lambda: one.is_open(2) and two.is_open(2), what="two members share the partitions")
    assert not set(one.status()["partitions"]) & set(two.status()["partitions"])
    world.rounds(600, 300)
    three = world.start()
    eventually(lambda: all(worker.is_open() and worker.status()["partitions"] for worker in (one, two, three)))
    world.rounds(900, 300)
    assert two.terminate() == 0
    one.kill()
    world.rounds(1200, 300)
    eventually(lambda: three.is_open(4), what="the last one has all partitions")
    settled(world)


def test_a_partition_that_stays_is_not_restored_again(world: World) -> None:
    one = world.serving()
    world.rounds(0, 400, keys=100)
    eventually(world.caught_up)
    two = world.start()
    eventually(lambda: one.is_open(2) and two.is_open(2))
    assert two.terminate() == 0
    eventually(lambda: one.is_open(4))
    moved = one.status()["restored"]
    kept = 100 - moved
    assert 0 < kept < 100, "the two that came back were restored, the two that stayed were not"
    world.rounds(400, 400, keys=100)
    settled(world)


def test_a_paused_worker_that_continues_changes_nothing_that_was_learned(world: World) -> None:
    paused = world.serving()
    world.rounds(0, 2000)
    paused.pause()
    successor = world.serving()
    world.rounds(2000, 500)
    paused.resume()
    eventually(lambda: paused.is_open(2) and successor.is_open(2), what="the paused worker is back in the group")
    world.rounds(2500, 500)
    eventually(world.caught_up)
    successor.kill()
    eventually(lambda: paused.is_open(4))
    world.rounds(3000, 500)
    eventually(world.caught_up)
    # Its last writes may come after those of its successor, so the last value of a key may be an old one: the join
    # of them all must be right, and the journal.
    assert set(world.facts()) == world.expected_facts()
    assert world.joined(world.names.decisions) == world.sent
    assert world.joined(world.names.changelog) == world.sent
    assert world.progress_is_true()


def test_a_write_that_fails_ends_the_worker_and_commits_nothing(world: World) -> None:
    worker = world.serving()
    world.rounds(0, 100)
    eventually(world.caught_up)
    before = world.committed()
    world.configure(world.names.decisions, max_message_bytes="100")
    world.rounds(100, 400)
    assert worker.ended() == 1
    assert "MessageSizeTooLarge" in worker.log.read_text(encoding="utf-8")
    assert world.committed() == before
    world.configure(world.names.decisions, max_message_bytes="1048588")
    world.serving()
    settled(world)


def test_a_transaction_marker_at_the_end_of_a_partition_does_not_stop_progress(world: World) -> None:
    world.serving()
    records = [(world.names.arrivals, b"key-%d" % key, orjson.dumps({"n": key})) for key in range(40)]
    world.send_raw(records, transaction=uuid.uuid4().hex)
    for key in range(40):
        world.sent[b"key-%d" % key][0].add(key)
    eventually(world.caught_up, what="the positions after the markers are committed")
    done = len(world.read(world.names.journal))

    def all_progress() -> bool:
        news = [orjson.loads(record.value) for record in world.read(world.names.journal)[done:]]
        return {body["partition"] for body in news if body["kind"] == "progress"} == set(range(4))

    eventually(all_progress, what="every partition makes progress")
    assert set(world.facts()) == world.expected_facts()


@pytest.mark.parametrize("how", [[], ["--kill"]], ids=["clean", "hard"])
def test_workers_wait_for_a_broker_that_restarts(own_broker: OwnBroker, tmp_path: Path, how: list[str]) -> None:
    with closing(World(own_broker.address, "own", tmp_path)) as world:
        worker = world.serving(session_timeout=6.0)
        world.rounds(0, 500)
        own_broker.restart(*how)
        world.rounds(500, 500)
        settled(world)
        assert worker.running
