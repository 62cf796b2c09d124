"""What was read of the changelog goes to the tasks in pieces: the heartbeats run in the same loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from faust.types import TP

from worker.kafka.faust import store as under_test
from worker.kafka.faust.store import SessionStore
from worker.kafka.records import Record, RecordList
from worker.stream.topology import Topics

NAMES = Topics("t")


class Task:
    """Takes sessions, and says how many at a time."""

    def __init__(self, partition: int) -> None:
        self.partition = partition
        self.sessions: dict[bytes, bytes] = {}
        self.pieces: list[int] = []
        self.released = False

    def restore(self, items: Iterable[tuple[bytes, bytes]]) -> None:
        if self.partition == 13:
            raise ZeroDivisionError("boom")
        some = dict(items)
        self.sessions |= some
        self.pieces.append(len(some))

    def release(self) -> None:
        self.released = True


class Scene:
    """A store, in an app that keeps no partition."""

    def __init__(self) -> None:
        self.failures: list[BaseException] = []
        self.made: list[Task] = []
        app = SimpleNamespace(
            names=NAMES,
            serving=SimpleNamespace(keep=lambda *_: set(), fail=self.failures.append),
            batch_consumer=SimpleNamespace(member=lambda: "me"),
            make_task=self._make,
        )
        self.store: Any = SessionStore.__new__(SessionStore)
        self.store.app = app
        self.store.__post_init__()

    def _make(self, partition: int) -> Task:
        self.made.append(Task(partition))
        return self.made[-1]

    async def assign(self, *partitions: int) -> None:
        await self.store.on_rebalance({TP(NAMES.changelog, partition) for partition in partitions}, set(), set(), 1)

    def read(self, partition: int, *pairs: tuple[bytes, bytes | None]) -> None:
        records = [Record(NAMES.changelog, partition, n, 0, key, value) for n, (key, value) in enumerate(pairs)]
        taken = RecordList(tp=TP(NAMES.changelog, partition), generation=1, start=0, end=len(records), records=records)
        event = SimpleNamespace(message=SimpleNamespace(value=taken))
        self.store.apply_changelog_batch([event], None, None)


@pytest.fixture(autouse=True)
def three_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take over three sessions at once."""
    monkeypatch.setattr(under_test, "AT_ONCE", 3)


def test_the_last_value_of_every_session_is_handed_over_in_pieces() -> None:
    async def scene() -> None:
        scene = Scene()
        await scene.assign(0, 1)
        scene.read(0, *((b"%d" % n, b"old") for n in range(8)), (b"3", b"new"), (b"4", None))
        await scene.store.on_recovery_completed(set(), set())
        handed = scene.store.hand_over()
        assert {partition: end for partition, (_, end) in handed.items()} == {0: 9, 1: -1}
        task = handed[0][0]
        assert task.sessions == {b"%d" % n: b"new" if n == 3 else b"old" for n in range(8) if n != 4}
        assert task.pieces == [3, 3, 1]
        assert handed[1][0].sessions == {}
        assert scene.store.hand_over() == {}

    asyncio.run(scene())


def test_the_loop_turns_between_the_pieces() -> None:
    async def scene() -> None:
        scene = Scene()
        await scene.assign(0)
        scene.read(0, *((b"%d" % n, b"v") for n in range(9)))
        restoring = asyncio.ensure_future(scene.store.on_recovery_completed(set(), set()))
        seen = []
        while not restoring.done():
            await asyncio.sleep(0)
            seen.append(len(scene.made[0].sessions) if scene.made else 0)
        assert {3, 6, 9} <= set(seen)

    asyncio.run(scene())


def test_partitions_that_are_given_out_anew_meanwhile_are_read_anew() -> None:
    async def scene() -> None:
        scene = Scene()
        await scene.assign(0)
        scene.read(0, *((b"%d" % n, b"v") for n in range(9)))
        restoring = asyncio.ensure_future(scene.store.on_recovery_completed(set(), set()))
        await asyncio.sleep(0)
        await scene.assign(0)
        await restoring
        first = scene.made[0]
        assert first.released
        assert len(first.sessions) < 9
        scene.read(0, (b"a", b"1"))
        await scene.store.on_recovery_completed(set(), set())
        (task, end) = scene.store.hand_over()[0]
        assert (task.sessions, end) == ({b"a": b"1"}, 0)

    asyncio.run(scene())


def test_a_session_that_cannot_be_taken_over_ends_the_worker() -> None:
    async def scene() -> None:
        scene = Scene()
        await scene.assign(13)
        scene.read(13, (b"a", b"1"))
        await scene.store.on_recovery_completed(set(), set())
        assert [type(failure) for failure in scene.failures] == [ZeroDivisionError]

    asyncio.run(scene())
