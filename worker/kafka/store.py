"""The session table as Faust sees it: the changelogs of newly assigned partitions, and their recovery.

`Partitions` holds the sessions in memory, in their own form, so that a decision needs no look-up in a store. Faust's
part is to read the changelog. Its stock memory store does that record by record, 37 s for 112,000 records where this
takes half a second, and again at every rebalance for all partitions, also for those that stay.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Literal

from faust.stores import STORES, memory
from faust.tables.manager import TableManager
from faust.tables.recovery import Recovery
from faust.types import TP, EventT

from worker.kafka.polls import RecordList
from worker.stream.topology import Record

if TYPE_CHECKING:
    from worker.kafka.app import WorkerApp

#: The scheme of store addresses that selects this store.
SCHEME: Final = "sessions"
STORES.aliases[SCHEME] = f"{__name__}:SessionStore"


class SessionStore(memory.Store):  # type: ignore[type-arg]
    """Table contents by partition, during a recovery."""

    app: WorkerApp

    def __post_init__(self) -> None:
        super().__post_init__()
        self.recovering: dict[int, dict[bytes, Record]] = {}
        self.ends: dict[int, int] = {}
        self.last_offsets: dict[int, int] = {}
        self.kept: Mapping[int, int] = {}

    async def on_rebalance(
        self, assigned: set[TP], revoked: set[TP], newly_assigned: set[TP], generation_id: int = 0
    ) -> None:
        """Find the partitions that have to be read. Half-read ones are read anew."""
        changelogs = [tp for tp in assigned if tp.topic == self.app.settings.topics.changelog]
        found = await self.app.consumer.highwaters(*changelogs)
        self.ends = {tp.partition: end for tp, end in found.items()}
        self.kept = self.app.partitions.keep(self.ends)
        self.recovering = {partition: {} for partition in self.ends if partition not in self.kept}
        self.last_offsets = {}

    def persisted_offset(self, tp: TP) -> int | None:
        """Return the last changelog offset whose effect is in memory.

        Not `None`: Faust would then continue where the last recovery ended, as if its results were still here.
        """
        return self.kept.get(tp.partition, -1)

    def apply_changelog_batch(
        self, batch: Iterable[EventT[Any]], to_key: Callable[[Any], Any], to_value: Callable[[Any], Any]
    ) -> None:
        """Take lists of changelog records."""
        for event in batch:
            taken: RecordList = event.message.value  # type: ignore[assignment]
            partition = taken.tp.partition
            table = self.recovering.get(partition)
            if table is None:
                # Kept: these were written by a worker that had lost the partition. The state in memory is newer.
                continue
            for record in taken.records:
                if record.key is None:
                    continue
                if record.value is None:
                    table.pop(record.key, None)
                else:
                    table[record.key] = record
            self.last_offsets[partition] = taken.end - 1

    async def on_recovery_completed(self, active_tps: set[TP], standby_tps: set[TP]) -> None:
        """Make the sessions of the partitions that were read.

        Faust also comes here when a rebalance has interrupted a recovery, and the next one is about to begin.
        """
        if any(self.last_offsets.get(partition, -1) < self.ends[partition] - 1 for partition in self.recovering):
            return
        tables, self.recovering = self.recovering, {}
        try:
            await self.app.partitions.restore(tables, self.last_offsets)
        except Exception as error:
            self.app.fail(error)  # Faust ignores exceptions here


class RecoveryEnd(asyncio.Event):
    """The end of a recovery as a condition.

    Faust sets the event and clears it again immediately. If the last changelog record is applied before anything waits
    for the event, which is likely in bulk, the signal is lost and the worker stays in its rebalance for ever. Setting
    the event once more from outside is worse: it stays set, and the next recovery ends before it has read anything.
    """

    def __init__(self, recovery: Recovery) -> None:
        super().__init__()
        self.recovery = recovery

    async def wait(self) -> Literal[True]:
        """Return when nothing is left to read; the event only shortens the time until the next check."""
        while self.recovery.in_recovery or self.recovery.need_recovery():
            self.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(0.5):
                    await super().wait()
        return True


class SessionRecovery(Recovery):
    """Recovery that cannot miss its own end."""

    ended: RecoveryEnd | None = None

    @property
    def signal_recovery_end(self) -> RecoveryEnd:
        """The end of a recovery."""
        if self.ended is None:
            self.ended = RecoveryEnd(self)
        return self.ended


class Tables(TableManager):
    """Faust's table manager, with `SessionRecovery`."""

    reading: SessionRecovery | None = None

    @property
    def recovery(self) -> SessionRecovery:
        """The recovery of tables."""
        if self.reading is None:
            self.reading = SessionRecovery(self.app, self, beacon=self.beacon, loop=self.loop)
        return self.reading

    async def on_stop(self) -> None:
        """Stop the recovery, which Faust would look for under another name."""
        await self.recovery.stop()
        await super().on_stop()
