"""The session table as Faust sees it: the changelogs of newly assigned partitions, until their tasks take them over.

The tasks hold the sessions in memory, in their own form, so that a decision needs no look-up in a store. Faust's part
is to read the changelog. Its stock memory store does that record by record, 37 s for 112,000 records where this takes
half a second, and again at every rebalance for all partitions, also for those that stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

from faust.stores import STORES, memory
from faust.types import TP, EventT

from worker.kafka.faust.link import Link, link_of
from worker.kafka.records import plain
from worker.stream.topology import Record

#: The scheme of store addresses that selects this store.
SCHEME = "adcascade"
STORES.aliases[SCHEME] = f"{__name__}:SessionStore"


class SessionStore(memory.Store):  # type: ignore[type-arg]
    """Table contents by partition, during a recovery."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._tables: dict[int, dict[bytes, Record]] = {}
        self._ends: dict[int, int] = {}
        self._kept: Mapping[int, int] = {}

    @property
    def _link(self) -> Link:
        return link_of(self.app)

    async def on_rebalance(
        self, assigned: set[TP], revoked: set[TP], newly_assigned: set[TP], generation_id: int = 0
    ) -> None:
        """Find the partitions that have to be read. Half-read ones are read anew."""
        changelog = self._link.options.topics.changelog
        partitions = {tp.partition for tp in assigned if tp.topic == changelog}
        member = cast(Any, self.app.consumer).member()
        self._kept = self._link.owner.assign(generation_id, member, partitions)
        self._tables = {partition: {} for partition in partitions - self._kept.keys()}
        self._ends = {}

    def persisted_offset(self, tp: TP) -> int | None:
        """Return the last changelog offset whose effect is in memory.

        Not `None`: Faust would then continue where the last recovery ended, as if its results were still here.
        """
        return self._kept.get(tp.partition, -1)

    def apply_changelog_batch(
        self, batch: Iterable[EventT[Any]], to_key: Callable[[Any], Any], to_value: Callable[[Any], Any]
    ) -> None:
        """Take lists of changelog records."""
        for event in batch:
            taken: Any = event.message.value
            table = self._tables.get(taken.tp.partition)
            if table is None:
                # Kept: these were written by a worker that had lost the partition. The state in memory is newer.
                continue
            for record in taken.records:
                if record.value is None:
                    table.pop(record.key, None)
                else:
                    table[record.key] = plain(record)
            self._ends[taken.tp.partition] = taken.end - 1

    async def on_recovery_completed(self, active_tps: set[TP], standby_tps: set[TP]) -> None:
        """Let the tasks take over the tables."""
        tables, self._tables = self._tables, {}
        await self._link.owner.restore(tables, self._ends)
