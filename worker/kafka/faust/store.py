"""The session table as Faust sees it: a place where a changelog is put together until the tasks take it over.

The tasks hold the sessions in memory, in their own form, so that a decision needs no look-up in a store. Faust's part
is to read the changelog of what is newly assigned. Its stock memory store does that record by record, 37 s for 112,000
records where this takes half a second, and again at every rebalance for all partitions, also for those that stay.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

from faust.stores import STORES, memory
from faust.types import TP, EventT

from worker.kafka.transport import PartitionTask

if TYPE_CHECKING:
    from worker.kafka.faust.app import WorkerApp

#: The scheme of store addresses that selects this store.
SCHEME = "adcascade"
STORES.aliases[SCHEME] = f"{__name__}:SessionStore"

#: How many sessions a task takes over before the loop may do something else, heartbeats above all.
AT_ONCE = 10_000


class SessionStore(memory.Store):  # type: ignore[type-arg]
    """Table contents by partition, during a recovery."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._shards: dict[int, dict[bytes, bytes]] = {}
        self._ends: dict[int, int] = {}
        self._kept: set[int] = set()
        self._restored: dict[int, PartitionTask] = {}

    async def on_rebalance(
        self, assigned: set[TP], revoked: set[TP], newly_assigned: set[TP], generation_id: int = 0
    ) -> None:
        """Decide which partitions have to be read; everything that was read half is read anew."""
        app = cast("WorkerApp", self.app)
        partitions = {tp.partition for tp in assigned if tp.topic == app.names.changelog}
        self._kept = app.serving.keep(generation_id, app.batch_consumer.member(), partitions)
        self._shards = {partition: {} for partition in partitions - self._kept}
        self._ends = {}
        for task in self._restored.values():
            task.release()  # nobody has taken it
        self._restored = {}

    def persisted_offset(self, tp: TP) -> int | None:
        """Return the last changelog offset that is known here.

        Not `None`: Faust would then go on from where the last recovery ended, as if what it read were still here.
        """
        if tp.partition in self._kept:
            return cast("WorkerApp", self.app).serving.lanes[tp.partition].changelog_end
        return -1

    def apply_changelog_batch(
        self, batch: Iterable[EventT[Any]], to_key: Callable[[Any], Any], to_value: Callable[[Any], Any]
    ) -> None:
        """Take lists of changelog records."""
        for event in batch:
            taken: Any = event.message.value
            shard = self._shards.get(taken.tp.partition)
            if shard is None:
                # Kept: written by a worker that did not know it had lost the partition. What this one has is newer.
                continue
            for record in taken.records:
                if record.value is None:
                    shard.pop(record.key, None)
                else:
                    shard[record.key] = record.value
            self._ends[taken.tp.partition] = taken.end - 1

    async def on_recovery_completed(self, active_tps: set[TP], standby_tps: set[TP]) -> None:
        """Let the tasks take over what was read."""
        app, shards = cast("WorkerApp", self.app), self._shards
        try:
            for partition in sorted(shards):
                task = self._restored[partition] = app.make_task(partition)
                contents = iter(shards[partition].items())
                while some := list(islice(contents, AT_ONCE)):
                    task.restore(some)
                    await asyncio.sleep(0)
                    if self._shards is not shards:
                        return  # the partitions were given out anew meanwhile
                shards[partition] = {}
        except Exception as error:
            app.serving.fail(error)  # Faust would not look at it

    def hand_over(self) -> dict[int, tuple[PartitionTask, int]]:
        """Return the tasks and the last changelog offset by partition, and forget them."""
        handed = {partition: (task, self._ends.get(partition, -1)) for partition, task in self._restored.items()}
        self._restored, self._shards = {}, {}
        return handed
