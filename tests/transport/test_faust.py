"""The Faust side of the transport, as far as it needs no broker."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from faust.types import TP

from tests.transport.fake import in_loop, settle
from worker.errors import FailedError
from worker.kafka.connection import Connection
from worker.kafka.faust import compat
from worker.kafka.faust.app import BackgroundService
from worker.kafka.faust.link import FaustOptions, Link
from worker.kafka.faust.recovery import RecoveryEnd
from worker.kafka.faust.store import SessionStore
from worker.kafka.transport import RecordList
from worker.stream.topology import Record, Topics

OPTIONS = FaustOptions(connection=Connection(servers=("k:1",)), topics=Topics("t"))
CHANGELOG = OPTIONS.topics.changelog


# ── store ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Owner:
    """Keeps partition 5, and notes what is restored."""

    def __init__(self) -> None:
        self.restored: list[Any] = []

    def assign(self, generation: int, member: str, partitions: set[int]) -> dict[int, int]:
        return {5: 77} if 5 in partitions else {}

    async def restore(self, tables: dict[int, Any], ends: dict[int, int]) -> None:
        self.restored.append((tables, dict(ends)))


@in_loop
async def test_a_recovery_gives_the_last_value_of_every_session_of_the_partitions_that_were_not_kept() -> None:
    owner = Owner()
    store: Any = SessionStore.__new__(SessionStore)
    store.app = SimpleNamespace(link=Link(OPTIONS, owner), consumer=SimpleNamespace(member=lambda: "me"))  # type: ignore[arg-type]
    store.__post_init__()

    def read(partition: int, *pairs: tuple[bytes, bytes | None]) -> None:
        tp = TP(CHANGELOG, partition)
        records = [Record(CHANGELOG, partition, n, 0, key, value) for n, (key, value) in enumerate(pairs)]
        taken = RecordList(tp=tp, generation=1, start=0, end=len(records), records=records)
        store.apply_changelog_batch([SimpleNamespace(message=SimpleNamespace(value=taken))], None, None)

    await store.on_rebalance({TP(CHANGELOG, p) for p in (0, 1, 5)} | {TP("t.arrivals", 9)}, set(), set(), 1)
    assert [store.persisted_offset(TP(CHANGELOG, p)) for p in (0, 5)] == [-1, 77]
    read(0, (b"a", b"old"), (b"b", b"1"), (b"a", b"new"), (b"b", None))
    read(5, (b"written by a worker that had lost the partition", b""))
    await store.on_recovery_completed(set(), set())
    assert owner.restored == [({0: {b"a": Record(CHANGELOG, 0, 2, 0, b"a", b"new")}, 1: {}}, {0: 3})]


# ── recovery ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Recovery:
    in_recovery: bool
    remaining: int = 0

    def need_recovery(self) -> bool:
        return self.remaining > 0


@in_loop
async def test_the_end_of_a_recovery_is_noticed_whenever_it_comes_and_never_before() -> None:
    over: Any = Recovery(in_recovery=False)
    await asyncio.wait_for(RecoveryEnd(over).wait(), 0.1)  # it came before anything waited
    recovery: Any = Recovery(in_recovery=True, remaining=5)
    end = RecoveryEnd(recovery)
    end.set()  # an old signal
    waiting = asyncio.create_task(end.wait())
    await settle()
    assert not waiting.done()
    recovery.in_recovery, recovery.remaining = False, 0
    end.set()
    end.clear()  # as Faust does, at once
    await asyncio.wait_for(waiting, 2)


# ── background tasks ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("stops", "failed"), [(False, ["no broker"]), (True, [])])
@in_loop
async def test_a_background_task_that_fails_fails_a_worker_that_does_not_stop_anyway(stops, failed) -> None:
    failures: list[BaseException] = []
    app: Any = SimpleNamespace(should_stop=stops, link=SimpleNamespace(owner=SimpleNamespace(fail=failures.append)))

    async def fail() -> None:
        raise OSError("no broker")

    async with BackgroundService(fail, app), BackgroundService(asyncio.Event().wait, app):
        await settle()
    assert [str(failure) for failure in failures] == failed


# ── compat ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_installed_libraries_are_the_ones_this_was_written_against() -> None:
    compat.check()


METADATA = "aiokafka.client:AIOKafkaClient._wait_on_metadata"


@pytest.mark.parametrize(
    ("table", "name", "wanted", "complaint"),
    [
        (compat.VERSIONS, "aiokafka", "9.9.9", r"pip install aiokafka==9\.9\.9"),
        (compat.SIGNATURES, METADATA, "self topic timeout", "_wait_on_metadata takes"),
        (compat.SIGNATURES, "aiokafka.client:AIOKafkaClient.gone", "self", "does not exist"),
    ],
)
def test_another_version_and_another_signature_are_refused(
    monkeypatch: pytest.MonkeyPatch, table: dict[str, str], name: str, wanted: str, complaint: str
) -> None:
    monkeypatch.setitem(table, name, wanted)
    with pytest.raises(FailedError, match=complaint):
        compat.check()
