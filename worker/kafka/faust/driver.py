"""A Faust transport driver on aiokafka that moves lists of records instead of single ones.

Faust's own consumer spends 130 µs and more on each message before an agent sees it. This one changes the following, and
nothing else:

- Records come as `RecordList`. Those of the inputs go to the owner, all of a poll in one call, without the queues and
  tasks of an agent. Each changelog partition comes as one message. Inputs are read only while the owner accepts them,
  that is between the end of one rebalance and the start of the next. Partitions of the topics in `Link.assigned_only`
  are never read: their assignment selects the worker that runs the learner.
- The committable positions of the owner are merged into Faust's commits. Faust itself acks nothing on those topics
  (``acks=False``): its ack happens when an iteration ends, however it ends.
- The client runs in the app's own loop (see `client`).
- The producer is idempotent with ``acks=all``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, cast

import aiokafka
from aiokafka.errors import IllegalStateError
from faust.transport.drivers import TRANSPORTS
from faust.transport.drivers import aiokafka as stock
from faust.types import TP, ConsumerMessage

from worker.kafka.faust.client import Client
from worker.kafka.faust.link import link_of
from worker.kafka.transport import RecordList

log = logging.getLogger(__name__)

#: The scheme of broker addresses that selects this driver.
SCHEME = "adcascade"
#: Seconds after which a worker that does not serve yet looks again at what it may read.
_SOON = 0.02
TRANSPORTS.aliases[SCHEME] = f"{__name__}:BatchTransport"


class BatchConsumer(stock.Consumer):
    """The Faust side of the consumer."""

    _thread: Client
    #: The active partitions of the last poll, whether inputs were accepted, and which of them were read.
    _last_readable: tuple[frozenset[TP], bool, frozenset[TP]] = (frozenset(), False, frozenset())

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._link = link_of(self.app)
        #: Where this generation starts to read each input partition.
        self.starts: dict[TP, int] = {}
        #: Where each of them ended when this generation began.
        self.ends: Mapping[TP, int] = {}

    def _new_consumer_thread(self) -> Client:
        return Client(self, loop=self.loop, beacon=self.beacon)

    def member(self) -> str:
        """Return the id of this member in the group."""
        return self._thread.member()

    @property
    def is_member(self) -> bool:
        """Whether the group cannot have assigned the partitions of this worker to others yet."""
        return self._thread.is_member

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _getmany(self, active_partitions: set[TP] | None, timeout: float) -> Any:  # noqa: ASYNC109 (Faust's)
        accepts = self._link.owner.accepts(self.app.consumer_generation_id)
        readable = self._readable(active_partitions or frozenset(), accepts)
        if not readable:
            # To aiokafka no partitions means all of them.
            await self.sleep(_SOON)
            return {}
        # While the worker recovers, the set of readable partitions changes at any time, and a poll does not notice.
        return await self._thread.getmany(cast(Any, readable), timeout if accepts else min(timeout, _SOON))

    def _readable(self, active: AbstractSet[TP], accepts: bool) -> frozenset[TP]:
        """Return the partitions that may be read now: the same object as before if they are the same."""
        before, accepted, readable = self._last_readable
        if accepted is not accepts or before != active:
            link = self._link
            skipped = link.assigned_only if accepts else link.assigned_only | link.inputs
            readable = frozenset(tp for tp in active if tp.topic not in skipped)
            self._last_readable = frozenset(active), accepts, readable
        return readable

    def _get_active_partitions(self) -> set[TP]:
        # Faust checks the type of each of them before every poll.
        active: set[TP] | None = self._active_partitions
        return super()._get_active_partitions() if active is None else active

    async def _wait_next_records(self, timeout: float) -> tuple[Any, set[TP] | None]:  # noqa: ASYNC109 (Faust's)
        """Read what may be read now. Where that is nothing, Faust sleeps for a second, in every rebalance."""
        if not self.flow_active:
            await self.wait(cast(Any, self.can_resume_flow))
        active = self._get_active_partitions()
        return await self._getmany(active, timeout), active

    async def getmany(
        self,
        timeout: float,  # noqa: ASYNC109 (Faust's)
    ) -> AsyncIterator[tuple[TP, ConsumerMessage]]:
        """Give the records of all inputs to the owner; yield one message per changelog partition that has records."""
        lists, active = await self._wait_next_records(timeout)
        if not lists or self.should_stop:
            return
        inputs: list[RecordList] = []
        for tp, taken in cast(Mapping[TP, RecordList], lists).items():
            # Lists that are dropped here have left the fetcher for good. For inputs, `PartitionPipelines` detects the
            # hole and reads it again; a changelog is read again by the recovery that follows every rebalance.
            if not self.flow_active or taken.generation != self.app.consumer_generation_id:
                return
            if active is None or tp in active or tp in self._buffered_partitions:
                if tp.topic in self._link.inputs:
                    inputs.append(taken)
                else:
                    self.app.monitor.track_tp_end_offset(tp, self.highwater(tp))
                    yield tp, self._message(taken)
        if inputs:
            await self._take(inputs)

    async def _take(self, inputs: list[RecordList]) -> None:
        # An exception that leaves this function would end the fetcher only, not the worker.
        try:
            await self._link.owner.take(inputs)
        except Exception as error:
            self._link.owner.fail(error)

    def take_at_once(self, active: Collection[TP], drain: Callable[[], Mapping[TP, RecordList]]) -> bool:
        """Give inputs to the owner while a poll of these partitions waits, if `getmany` would do so now.

        Return whether that was done; if not, nothing was drained.
        """
        owner = self._link.owner
        if (
            not self.flow_active
            or self.should_stop
            or not owner.accepts(self.app.consumer_generation_id)
            or self._readable(self._get_active_partitions(), True) is not active
            or not owner.has_room
        ):
            return False
        try:
            owner.take_at_once([*drain().values()])
        except Exception as error:
            owner.fail(error)
        return True

    async def sleep(self, n: Any, **options: Any) -> None:
        """Sleep; without a duration, as Faust does before every poll, only let other tasks run.

        They have run if the last poll had to wait. That is one turn of the loop less for each poll of a live worker.
        """
        if n:
            await super().sleep(n, **options)
        elif self._thread.has_waited:
            self._thread.has_waited = False
        else:
            await asyncio.sleep(0)

    def _message(self, taken: RecordList) -> ConsumerMessage:
        tp = taken.tp
        return ConsumerMessage(
            tp.topic,
            tp.partition,
            max(taken.end - 1, 0),
            taken.records[-1].timestamp / 1000 if taken.records else 0.0,
            0,
            None,
            None,
            cast(Any, taken),
            None,
            0,
            0,
            tp,
            generation_id=taken.generation,
        )

    async def seek_to_committed(self) -> Mapping[TP, int]:
        """Seek to the committed offsets; where there is none that exists, to the first record."""
        offsets = dict(await super().seek_to_committed())
        inputs = [tp for tp in self.assignment() if tp.topic in self._link.inputs]
        if not inputs:
            return offsets
        first, last = await self.earliest_offsets(*inputs), await self.highwaters(*inputs)
        starts = {}
        for tp in inputs:
            committed = offsets.get(tp)
            start = first[tp] if committed is None or committed < 0 else committed
            if not first[tp] <= start <= last[tp]:
                log.error(
                    "%s-%d: the committed position %d is not between %d and %d: the topic was trimmed or made anew",
                    *(tp.topic, tp.partition, start, first[tp], last[tp]),
                )
                start = first[tp]
            starts[tp] = offsets[tp] = start
        # Also where nothing is committed: aiokafka would find the position only later, and not report it.
        self._thread.seek_to(starts)
        self.starts, self.ends = starts, last
        return offsets

    def read_again(self, tp: TP, offset: int) -> None:
        """Continue reading a partition at a position that was skipped."""
        self.add_future(self._read_again(tp, offset))

    async def _read_again(self, tp: TP, offset: int) -> None:
        try:
            first = (await self.earliest_offsets(tp))[tp]
            if first > offset:
                self._link.owner.skip(tp, first)
                offset = first
            self._thread.seek_to({tp: offset})
        except IllegalStateError:
            log.info("%s-%d has been revoked meanwhile", tp.topic, tp.partition)

    # ── rebalance and commit ─────────────────────────────────────────────────────────────────────────────────────────

    async def on_partitions_assigned(self, assigned: set[TP], generation_id: int = 0) -> None:
        """Start a generation."""
        self._thread.note_membership()
        await super().on_partitions_assigned(assigned, generation_id)

    async def on_partitions_revoked(self, revoked: set[TP]) -> None:
        """Stop taking records, then let Faust wait for those in flight, commit them, and continue."""
        self._link.owner.close()
        await super().on_partitions_revoked(revoked)

    async def wait_empty(self) -> None:
        """Wait for everything in flight to be acknowledged, then commit it."""
        self._link.owner.close()
        if not await self._link.owner.drained(self._link.options.drain_timeout):
            log.warning("not all records were written in time; they will be read and written again")
        await super().wait_empty()

    def _filter_committable_offsets(self, tps: Iterable[TP]) -> dict[TP, int]:
        offsets: dict[TP, int] = super()._filter_committable_offsets(tps)
        for tp, offset in self._link.owner.committable().items():
            if offset > self.starts.get(tp, -1) and self._should_commit(tp, offset):
                offsets[tp] = offset
        return offsets

    def verify_event_path(self, now: float, tp: TP) -> None:
        """Disable Faust's livelock detector: it takes lists, and partitions that are never read, for a stall."""


class BatchProducer(stock.Producer):
    """Writes each record once, in order, to all replicas."""

    def _settings_default(self) -> Mapping[str, Any]:
        options = link_of(self.app).options
        settings = {**super()._settings_default(), **options.connection.arguments()}
        return {**settings, "linger_ms": 0, "max_batch_size": options.batch_bytes, "acks": "all"}

    def _settings_auth(self) -> Mapping[str, Any]:
        return {}  # in the arguments of the connection, above

    def _settings_extra(self) -> Mapping[str, Any]:
        return {"enable_idempotence": True}

    @property
    def aiokafka(self) -> aiokafka.AIOKafkaProducer:
        """The producer below."""
        return self._ensure_producer()


class BatchTransport(stock.Transport):
    """The driver that Faust selects by the scheme."""

    Consumer = BatchConsumer
    Producer = BatchProducer
