"""A Faust transport on aiokafka that hands over one message per poll instead of one per record.

Faust's own consumer spends 130 µs and more on each message before an agent sees it; this spends that on all that a poll
has brought. What it changes, and nothing else:

- What was read comes as `RecordList`: all inputs of a poll in one message, each changelog partition in one. Inputs are
  read only while `Serving` is open, that is between the end of one rebalance and the start of the next. Partitions of
  the topics in `owned_only` are never read: they are assigned to say who is in charge.
- What `Serving` has acknowledged is merged into Faust's commits. Faust itself acks nothing on those topics
  (``acks=False``): its ack happens when an iteration ends, however it ends.
- The client runs in the app's own loop (see `client`).
- The producer is idempotent with ``acks=all``.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import aiokafka
from aiokafka.errors import IllegalStateError
from faust.transport.drivers import TRANSPORTS
from faust.transport.drivers import aiokafka as stock
from faust.types import TP, ConsumerMessage

from worker.kafka.faust.client import Client
from worker.kafka.records import RecordList

if TYPE_CHECKING:
    from worker.kafka.faust.app import WorkerApp

log = logging.getLogger(__name__)

#: The scheme of broker addresses that selects this driver.
SCHEME = "adcascade"
TRANSPORTS.aliases[SCHEME] = f"{__name__}:Transport"


class Consumer(stock.Consumer):
    """The Faust side of the consumer."""

    _thread: Client

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        #: Where this generation starts to read each input partition.
        self.starts: dict[TP, int] = {}

    @property
    def worker(self) -> WorkerApp:
        """The app, by its own type."""
        return cast("WorkerApp", self.app)

    def _new_consumer_thread(self) -> Client:
        return Client(self, loop=self.loop, beacon=self.beacon)

    def member(self) -> str:
        """Return the name of this member in the group."""
        return self._thread.member()

    @property
    def is_member(self) -> bool:
        """Whether the group cannot have given the partitions of this worker to others yet."""
        return self._thread.is_member

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _getmany(self, active_partitions: set[TP] | None, timeout: float) -> Any:  # noqa: ASYNC109 (Faust's)
        skipped = self.worker.owned_only if self.worker.may_read else self.worker.owned_only | self._inputs
        readable = {tp for tp in active_partitions or () if tp.topic not in skipped}
        if not readable:
            # To aiokafka no partitions means all of them.
            await self.sleep(0.02)
            return {}
        return await self._thread.getmany(readable, timeout)

    def is_behind_arrivals(self, tp: TP) -> bool:
        """Say whether a partition has no arrivals."""
        return tp.topic != self._arrivals

    def is_input(self, tp: TP) -> bool:
        """Say whether a partition has arrivals or feedback."""
        return tp.topic in self._inputs

    @cached_property
    def _arrivals(self) -> str:
        return self.worker.names.arrivals

    @cached_property
    def _inputs(self) -> frozenset[str]:
        return self.worker.names.inputs

    async def getmany(
        self,
        timeout: float,  # noqa: ASYNC109 (Faust's)
    ) -> AsyncIterator[tuple[TP, ConsumerMessage]]:
        """Yield one message for all inputs that have news, and one per partition of the changelog that has."""
        lists, active = await self._wait_next_records(timeout)
        if not lists or self.should_stop:
            return
        inputs: list[RecordList] = []
        for tp, taken in cast(Mapping[TP, RecordList], lists).items():
            # What is dropped here was taken from the fetcher for good. For inputs `Serving` notices that and reads it
            # again; a changelog is read again by the recovery that follows every rebalance.
            if not self.flow_active or taken.generation != self.app.consumer_generation_id:
                return
            if active is None or tp in active or tp in self._buffered_partitions:
                self.app.monitor.track_tp_end_offset(tp, self.highwater(tp))
                if self.is_input(tp):
                    inputs.append(taken)
                else:
                    yield tp, self._message(taken, taken)
        if inputs:
            self.worker.serving.offer()
            # Under the name of any of them: Faust sends it to the one agent that all inputs have.
            yield inputs[-1].tp, self._message(inputs[-1], inputs)

    def _message(self, taken: RecordList, value: Any) -> ConsumerMessage:
        tp = taken.tp
        return ConsumerMessage(
            tp.topic,
            tp.partition,
            max(taken.end - 1, 0),
            taken.records[-1].timestamp / 1000 if taken.records else 0.0,
            0,
            None,
            None,
            value,
            None,
            0,
            0,
            tp,
            generation_id=taken.generation,
        )

    async def seek_to_committed(self) -> Mapping[TP, int]:
        """Seek to the committed offsets; where there is none that exists, to the first record."""
        offsets = dict(await super().seek_to_committed())
        inputs = [tp for tp in self.assignment() if self.is_input(tp)]
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
        # Also those where nothing is committed: then the position is known here and not only to aiokafka, some time.
        self._thread.seek_to(starts)
        self.starts = starts
        return offsets

    def reread(self, tp: TP, offset: int) -> None:
        """Read a partition again from a position that was skipped."""
        self.add_future(self._reread(tp, offset))

    async def _reread(self, tp: TP, offset: int) -> None:
        try:
            first = (await self.earliest_offsets(tp))[tp]
            if first > offset:
                self.worker.serving.skip(tp, first)
                offset = first
            self._thread.seek_to({tp: offset})
            # Faust drops what ends before the last message it saw.
            self._read_offset[tp] = None
        except IllegalStateError:
            log.info("%s-%d has been revoked meanwhile", tp.topic, tp.partition)

    # ── rebalance and commit ─────────────────────────────────────────────────────────────────────────────────────────

    async def on_partitions_assigned(self, assigned: set[TP], generation_id: int = 0) -> None:
        """Begin a generation."""
        self._thread.join()
        await super().on_partitions_assigned(assigned, generation_id)

    async def on_partitions_revoked(self, revoked: set[TP]) -> None:
        """Stop taking records, then let Faust wait for what is under way, commit it, and go on."""
        self.worker.serving.close()
        await super().on_partitions_revoked(revoked)

    async def wait_empty(self) -> None:
        """Wait for everything under way to be acknowledged, then commit it."""
        self.worker.serving.close()
        if not await self.worker.serving.drained(self.worker.options.drain_timeout):
            log.warning("not everything could be written in time; it will be read and written again")
        await super().wait_empty()

    def _filter_committable_offsets(self, tps: Iterable[TP]) -> dict[TP, int]:
        offsets: dict[TP, int] = super()._filter_committable_offsets(tps)
        for tp, offset in self.worker.serving.committable().items():
            if offset > self.starts.get(tp, -1) and self._should_commit(tp, offset):
                offsets[tp] = offset
        return offsets

    def verify_event_path(self, now: float, tp: TP) -> None:
        """Do without Faust's livelock detector: it takes lists for a stall, and partitions that are not read too."""


class Producer(stock.Producer):
    """Writes each record once, in order, to all replicas."""

    def _settings_default(self) -> Mapping[str, Any]:
        options = cast("WorkerApp", self.app).options
        settings = {**super()._settings_default(), **options.connection.arguments()}
        return {**settings, "linger_ms": 0, "max_batch_size": options.batch_bytes, "acks": "all"}

    def _settings_auth(self) -> Mapping[str, Any]:
        return {}  # with the connection, above

    def _settings_extra(self) -> Mapping[str, Any]:
        return {"enable_idempotence": True}

    @property
    def aiokafka(self) -> aiokafka.AIOKafkaProducer:
        """The producer below."""
        return self._ensure_producer()


class Transport(stock.Transport):
    """The transport that Faust finds by the scheme."""

    Consumer = Consumer
    Producer = Producer
