"""The session table as Faust sees it: a place where a changelog is put together until the tasks take it over.

The tasks hold the sessions in memory, in their own form, so that a decision needs no look-up in a store. Faust's part
is to read the changelog of what is newly assigned. Its stock memory store does that record by record, 37 s for 112,000
records where this takes half a second, and again at every rebalance for all partitions, also for those that stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, cast

from faust.stores import STORES, memory
from faust.types import TP, EventT

if TYPE_CHECKING:
    from worker.runners.faust.app import WorkerApp

#: The scheme of store addresses that selects this store.
SCHEME = "adcascade"
STORES.aliases[SCHEME] = f"{__name__}:SessionStore"


class SessionStore(memory.Store):  # type: ignore[type-arg]
    """Table contents by partition, during a recovery."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._shards: dict[int, dict[bytes, bytes]] = {}
        self._ends: dict[int, int] = {}
        self._kept: set[int] = set()

    async def on_rebalance(
        self, assigned: set[TP], revoked: set[TP], newly_assigned: set[TP], generation_id: int = 0
    ) -> None:
        """Decide which partitions have to be read; everything that was read half is read anew."""
        app = cast("WorkerApp", self.app)
        partitions = {tp.partition for tp in assigned if tp.topic == app.names.changelog}
        self._kept = app.serving.keep(generation_id, app.batch_consumer.member(), partitions)
        self._shards = {partition: {} for partition in partitions - self._kept}
        self._ends = {}

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
        """Keep everything: the tasks take it when the rebalance ends."""

    def hand_over(self) -> dict[int, tuple[dict[bytes, bytes], int]]:
        """Return contents and last offset by partition, and forget them: from now on the tasks have them."""
        handed = {partition: (shard, self._ends.get(partition, -1)) for partition, shard in self._shards.items()}
        self._shards = {}
        return handed
