"""One worker at a time folds the journal, and every worker hears what was learned."""

from __future__ import annotations

import orjson
import pytest

from tests.kafka.world import World, eventually

pytestmark = pytest.mark.slow


def versions(world: World) -> list[bytes]:
    return [record.value for record in world.read(world.names.parameters)]


def numbers(world: World) -> list[int]:
    return [orjson.loads(value)["version"] for value in versions(world)]


def test_the_learner_goes_on_at_another_worker_where_the_last_version_says(world: World) -> None:
    one = world.serving()
    two = world.start()
    eventually(lambda: one.is_open(2) and two.is_open(2))
    world.rounds(0, 500)
    eventually(lambda: numbers(world)[-1:] == [10], what="1000 facts make 10 versions after the first")
    learner, other = (one, two) if one.status()["learns"] else (two, one)
    assert not other.status()["learns"]
    learner.kill()
    world.rounds(500, 500)
    # What the killed worker had not committed is journaled again, so there may be a version more.
    eventually(lambda: other.status()["learns"] and numbers(world)[-1:] >= [20])
    eventually(lambda: other.status()["version"] == numbers(world)[-1])
    found = numbers(world)
    assert found == list(range(len(found))), "each version once, in order"


def test_every_worker_hears_every_version(world: World) -> None:
    one, two = world.serving(), world.start()
    eventually(lambda: one.is_open(2) and two.is_open(2))
    world.rounds(0, 200)
    eventually(lambda: one.status()["version"] == two.status()["version"] == 4)


def test_a_paused_learner_publishes_nothing_that_is_there_already(world: World) -> None:
    paused = world.serving()
    world.rounds(0, 100)
    eventually(lambda: numbers(world)[-1:] == [2])
    assert paused.status()["learns"]
    paused.pause()
    successor = world.serving()
    world.rounds(100, 400)
    eventually(lambda: numbers(world)[-1:] >= [10])
    paused.resume()
    eventually(lambda: paused.is_open(2) and successor.is_open(2))
    world.rounds(500, 100)
    eventually(lambda: numbers(world)[-1:] >= [12])
    found = versions(world)
    assert len(set(numbers(world))) == len(set(found)), "a version that came twice is the same to the byte"


def test_a_journal_that_was_trimmed_too_early_stops_the_learner_but_not_the_serving(world: World) -> None:
    first = world.serving()
    world.rounds(0, 130)
    eventually(lambda: numbers(world)[-1:] == [2])
    first.kill()
    end = sum(world.ends(world.names.journal).values())
    world.trim(world.names.journal, end)
    second = world.serving()
    eventually(lambda: "trimmed" in second.status()["learner_failure"])
    assert not second.status()["learns"]
    world.rounds(130, 50)
    eventually(world.caught_up)
    assert numbers(world) == [0, 1, 2]
