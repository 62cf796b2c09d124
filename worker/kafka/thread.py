"""The client thread: the only user of the worker's librdkafka consumer.

Rules that hold in this file:

- Nobody else calls the consumer. Calls from the event loop are queued and run between two polls. (`pause` and `seek`
  from another thread hold the interpreter lock while librdkafka waits for its own thread, and dead-lock.)
- What is read, and from where, is said with `assign` alone: it starts, stops and moves partitions in one step, and
  nothing read before it comes after it.
- Each partition has one position that comes next. A record before it is dropped.
- The thread never waits without running the queue: the loop may wait for one of its calls.
- The thread also serves the producer's delivery reports. The loop would spend a quarter of its time on that.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, TypeVar

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition
from faust.types import TP

from worker.kafka.clients import record_of
from worker.kafka.connection import reason_of
from worker.kafka.polls import Poll, RecordList
from worker.stream.topology import Record

if TYPE_CHECKING:
    from worker.kafka import consumer as faust_side

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Records in a poll: the loop does nothing else until they are handled.
MOST_RECORDS: Final = 2_048
#: Polls that are handled, or wait for that. What comes meanwhile makes the next poll larger.
MOST_POLLS: Final = 1
#: Seconds that a poll waits for its first record. Calls and delivery reports wait as long.
POLL_WAIT: Final = 0.05
#: The same while nothing is read, or while there is no room for a poll.
IDLE_WAIT: Final = 0.005
_ERROR_PAUSE: Final = 0.1


class ClientThread(threading.Thread):
    """Polls a consumer in a group and hands polls to the event loop.

    Parameters
    ----------
    consumer : one that is not subscribed yet
    owner : in the loop, takes rebalances and fatal errors, and its flights the delivery reports
    serve_reports : serves the producer's delivery reports; returns whether there were any
    drain : seconds that a revocation may wait for the loop
    """

    def __init__(
        self,
        consumer: Consumer,
        owner: faust_side.Consumer,
        *,
        serve_reports: Callable[[], bool],
        drain: float,
    ) -> None:
        super().__init__(name="kafka-client", daemon=True)
        self._group_consumer = consumer
        self._owner = owner
        self._serve_reports, self._flights = serve_reports, owner.flights
        self._has_reports, self._reported = False, 0.0
        self._drain = drain
        self._event_loop = asyncio.get_running_loop()
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._positions: dict[tuple[str, int], int] = {}
        self._generation = self._number = 0
        self._is_over = self._is_revoking = False
        self._unhandled = 0  # polls of this generation
        self._polls: asyncio.Queue[Poll] = asyncio.Queue()  # of the loop

    # ── in the loop ──────────────────────────────────────────────────────────────────────────────────────────────────

    def call(self, function: Callable[[Consumer], T]) -> asyncio.Future[T]:
        """Queue a call of the consumer; it must not block for long."""
        result: Future[T] = Future()

        def run() -> None:
            try:
                result.set_result(function(self._group_consumer))
            except BaseException as error:
                result.set_exception(error)

        self._calls.put(run)
        return asyncio.wrap_future(result)

    def subscribe(self, topics: Iterable[str]) -> asyncio.Future[None]:
        """Join the group."""
        names, owner = list(topics), self._owner
        return self.call(
            lambda consumer: consumer.subscribe(
                names,
                on_assign=self._take_assignment,
                on_revoke=lambda _, revoked: self._give_up(owner.on_revoked(_tps(revoked))),
                on_lost=lambda _, lost: self._give_up(owner.on_lost(_tps(lost))),
            )
        )

    def read(self, positions: Mapping[TP, int], generation: int) -> asyncio.Future[None]:
        """Read these partitions from now on, and no others, from these positions unless they are being read.

        A new generation starts all of them there.
        """

        def read(_: Consumer) -> None:
            if generation != self._generation:
                self._generation, self._number, self._unhandled = generation, 0, 0
                self._positions = {}
            self._positions = {tp: self._positions.get(tp, offset) for tp, offset in positions.items()}
            self._apply_positions()

        return self.call(read)

    async def next_poll(self) -> Poll:
        """Return the next poll, of any generation."""
        return await self._polls.get()

    def handled(self, generation: int) -> None:
        """Note that a poll of a generation is handled: there is room for the next."""

        def release() -> None:
            if generation == self._generation:
                self._unhandled -= 1

        self._calls.put(release)

    async def close(self) -> None:
        """Leave the group and end."""

        def end(_: Consumer) -> None:
            self._is_over = True

        await self.call(end)
        await asyncio.to_thread(self.join)

    # ── in the thread ────────────────────────────────────────────────────────────────────────────────────────────────

    def run(self) -> None:
        """Poll until closed."""
        while not self._is_over:
            try:
                self._run_calls()
                self._poll()
                self._report()
            except Exception:
                log.exception("the client thread goes on after an error")
                time.sleep(_ERROR_PAUSE)
        self._group_consumer.close()
        self._report()

    def _poll(self) -> None:
        if not self._positions:
            self._wait_for_call()
        elif self._unhandled >= MOST_POLLS:
            self._wait_for_call()
            return
        first = self._group_consumer.poll(POLL_WAIT if self._positions else 0)
        if first is not None:
            self._hand_over([first, *self._group_consumer.consume(MOST_RECORDS - 1, 0)])

    def _run_calls(self) -> None:
        while not self._calls.empty():
            self._calls.get()()

    def _wait_for_call(self) -> None:
        try:
            self._calls.get(timeout=IDLE_WAIT)()
        except queue.Empty:
            return

    def _report(self) -> None:
        self._has_reports = self._serve_reports() or self._has_reports
        # Every wake-up of the loop costs as much as joining a click: only where somebody waits, or after a while.
        if self._has_reports and (self._flights.are_awaited or monotonic() > self._reported + POLL_WAIT):
            self._has_reports, self._reported = False, monotonic()
            self._in_loop(self._flights.advance)

    def _in_loop(self, function: Callable[[], None]) -> None:
        try:
            self._event_loop.call_soon_threadsafe(function)
        except RuntimeError:
            self._is_over = True  # the loop is closed

    def _hand_over(self, messages: list[Message]) -> None:
        """Sort messages into lists, and give them to the loop."""
        positions, lists = self._positions, dict[tuple[str, int], list[Record]]()
        for message in messages:
            tp = message.topic(), message.partition()
            expected, error = positions.get(tp), message.error()
            if error is not None:
                self._handle_error(tp, expected, message, error, lists)
            elif expected is not None and message.offset() >= expected:
                record = record_of(message)
                positions[tp] = record.offset + 1
                if tp in lists:
                    lists[tp].append(record)
                else:
                    lists[tp] = [record]
        if lists:
            made = [RecordList(TP(*tp), positions[tp], records) for tp, records in lists.items()]
            poll = Poll(self._generation, self._number, made, monotonic())
            self._number += 1
            self._unhandled += 1
            self._in_loop(partial(self._polls.put_nowait, poll))

    def _handle_error(
        self,
        tp: tuple[str, int],
        expected: int | None,
        message: Message,
        error: KafkaError,
        lists: dict[tuple[str, int], list[Record]],
    ) -> None:
        """Handle what comes in place of a record: the end of a partition, or an error."""
        code = error.code()
        if code == KafkaError._PARTITION_EOF:
            if expected is not None and message.offset() > expected:
                self._positions[tp] = message.offset()  # over the mark of a transaction
                lists.setdefault(tp, [])
        elif code == KafkaError._AUTO_OFFSET_RESET:
            if expected is not None:
                self._restart(tp, expected)
        elif error.fatal():
            self._in_loop(partial(self._owner.on_fatal, error))
        else:
            log.warning("Kafka: %s", error.str())

    def _restart(self, tp: tuple[str, int], expected: int) -> None:
        """Continue at the first record that there is: the ones expected were deleted, or the topic was made anew."""
        try:
            first, end = self._group_consumer.get_watermark_offsets(TopicPartition(*tp), timeout=10.0)
        except KafkaException as error:
            log.warning("%s-%d: %s; trying again", *tp, reason_of(error))
        else:
            last = end - 1
            log.error("%s-%d: no record %d, there are %d to %d (retention, or a new topic)", *tp, expected, first, last)
            self._positions[tp] = first
        self._apply_positions()

    def _apply_positions(self) -> None:
        # In a revocation librdkafka waits for `unassign`, and accepts nothing else.
        if not self._is_revoking:
            self._group_consumer.assign([TopicPartition(*tp, offset) for tp, offset in self._positions.items()])

    # ── rebalances, in the thread ────────────────────────────────────────────────────────────────────────────────────

    def _take_assignment(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self._positions = {}
        consumer.assign([])
        self._begin(self._owner.on_assigned(_tps(partitions)))

    def _begin(self, work: Coroutine[Any, Any, None]) -> Future[None] | None:
        if self._is_over:
            work.close()
            return None
        return asyncio.run_coroutine_threadsafe(work, self._event_loop)

    def _give_up(self, work: Coroutine[Any, Any, None]) -> None:
        """Wait for the loop, but not for ever: the group waits for this member."""
        self._is_revoking = True
        started, deadline = self._begin(work), monotonic() + self._drain
        while started is not None and not started.done():
            if monotonic() > deadline:
                log.warning("not all records were written in time; they will be read and written again")
                break
            self._wait_for_call()
            self._report()
        self._is_revoking, self._positions = False, {}
        self._group_consumer.unassign()


def _tps(partitions: Iterable[TopicPartition]) -> set[TP]:
    return {TP(one.topic, one.partition) for one in partitions}
