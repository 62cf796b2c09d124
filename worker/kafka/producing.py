"""What an idempotent producer has gathered, sent without its tasks.

For every request aiokafka wakes its sender, starts a task with a timer, and wakes a third task that reads the answer.
Here a request leaves with `flush`, or at the end of the turn in which its records were written, and its answer is
handled by the call that reads its bytes (see `worker.kafka.direct`).

Rules that hold in this file:

- A broker has one request at a time, and so has a partition. What is written meanwhile goes together in the next one.
- Sequence numbers are aiokafka's: a batch takes its own from the same counter, once, when it is taken for a request.
- Errors are judged by aiokafka. An answer with an error, and a request that was not answered, go to its own handler, in
  a task: it repeats what can be repeated, with the same numbers. Only an answer without any error is handled here.
- Without a connection or a leader, aiokafka's sender sends. Both use the same marks of what is on its way.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from aiokafka import AIOKafkaProducer
from aiokafka.conn import AIOKafkaConnection
from aiokafka.errors import KafkaConnectionError, KafkaError
from aiokafka.producer.message_accumulator import BatchBuilder, MessageAccumulator, MessageBatch
from aiokafka.producer.sender import SendProduceReqHandler
from aiokafka.producer.transaction_manager import TransactionManager
from aiokafka.protocol.produce import ProduceRequest
from aiokafka.record.default_records import DefaultRecordBatchBuilder
from aiokafka.structs import RecordMetadata, TopicPartition

from worker.kafka.direct import PendingAnswer, SilenceWatch, open_connection, send, send_encoded
from worker.kafka.messages import PRODUCE_VERSIONS, encode_produce, version

_WITH_START: Final = range(5, 8)  # versions of an answer with the first offset of each partition


class Acknowledgement:
    """The end of a batch: like a future, but its callbacks are called at once, not in a turn of the loop for each.

    >>> end = Acknowledgement()
    >>> end.add_done_callback(lambda ended: print(ended.result()))
    >>> end.set_result("written")
    written
    """

    # What nothing was set for is the class's: there are nine of these in a poll, and most have one callback.
    _callbacks: list[Callable[[Any], object]] | None = None
    _done = False
    _result: Any = None
    _error: BaseException | None = None

    def done(self) -> bool:
        """Return whether it has ended."""
        return self._done

    def cancelled(self) -> bool:
        """Return False: what is written cannot be taken back."""
        return False

    def result(self) -> Any:
        """Return the result, or raise the error."""
        if self._error is not None:
            raise self._error
        return self._result

    def exception(self) -> BaseException | None:
        """Return the error, if there is one."""
        return self._error

    def set_result(self, result: Any) -> None:
        """End well."""
        self._result, self._done = result, True
        callbacks, self._callbacks = self._callbacks, None
        for callback in callbacks or ():
            callback(self)

    def set_exception(self, error: BaseException) -> None:
        """End with an error."""
        self._error = error
        self.set_result(None)

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Call a function at the end, with this."""
        if self._done:
            callback(self)
        elif self._callbacks is None:
            self._callbacks = [callback]
        else:
            self._callbacks.append(callback)

    def remove_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Do not call a function at the end."""
        self._callbacks = [one for one in self._callbacks or () if one != callback]


class Builder(BatchBuilder):  # type: ignore[misc]
    """A builder that is made in one step."""

    _relative_offset = 0
    _buffer: bytearray | None = None
    _closed = False
    _key_serializer = _value_serializer = None

    def __init__(self, size: int, compression: int) -> None:
        self._builder = DefaultRecordBatchBuilder(2, compression, 0, -1, -1, 0, size)

    def _build(self) -> bytearray:
        if self._buffer is None:
            self._closed = True
            self._buffer = self._builder.build()
            del self._builder
        return self._buffer


class Batch(MessageBatch):  # type: ignore[misc]
    """A batch without futures of the loop, of a producer without transactions.

    `is_taken` says whether its records have sequence numbers: then no more may be added.
    """

    _linger_time = 0.0
    _retry_count = 0
    is_taken = False
    _drained: Acknowledgement | None = None

    def __init__(self, tp: TopicPartition, builder: Builder, accumulator: MessageAccumulator) -> None:
        self._builder, self._tp, self._ttl = builder, tp, accumulator._batch_ttl
        self._pending = accumulator._pending_batches
        self._ctime = time.monotonic()
        self.future = Acknowledgement()
        self._msg_futures: list[Any] = []

    def take(self, numbers: TransactionManager) -> None:
        """Reserve the sequence numbers of the records, as aiokafka does when it takes a batch for the first time."""
        tp, builder = self._tp, self._builder
        # The order matters: the numbers of the next batch begin behind these.
        first = numbers._sequence_numbers[tp]
        numbers.increment_sequence_number(tp, builder._relative_offset)
        builder._builder.set_producer_state(*numbers._pid_and_epoch, first)
        self._retry_count = 1
        self._pending.add(self)
        self.drain_ended()

    def drain_ended(self) -> None:
        """Note that the batch was taken."""
        self.is_taken = True
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    def drain_ready(self) -> None:
        """Take the batch once more, for aiokafka."""
        self.drain_ended()
        self._retry_count += 1

    def reset_drain(self) -> None:
        """Wait for another request."""
        self.is_taken, self._drained = False, None

    @property
    def _drain_waiter(self) -> Acknowledgement:
        """The end of the wait for a request, for aiokafka, which seldom asks for it."""
        if self._drained is None:
            self._drained = Acknowledgement()
            if self.is_taken:
                self._drained.set_result(None)
        return self._drained

    def done(self, base_offset: int, timestamp: int | None = None, log_start_offset: int | None = None) -> None:
        """Note that all replicas have the records."""
        if self._msg_futures:  # of somebody who has used the producer itself
            super().done(base_offset, timestamp, log_start_offset)
        elif not self.future._done:
            tp = self._tp
            kind = 0 if timestamp == -1 else 1
            self.future.set_result(RecordMetadata(*tp, tp, base_offset, timestamp, kind, log_start_offset))
        self._pending.discard(self)

    def failure(self, exception: BaseException) -> None:
        """Note that the records cannot be written, and that no more may be added."""
        super().failure(exception)
        self.is_taken = True
        # Not at once: aiokafka calls this for each of the pending batches.
        asyncio.get_running_loop().call_soon(self._pending.discard, self)


class ProduceRequests:
    """Sends the batches of a started producer, in its own loop."""

    def __init__(self, producer: AIOKafkaProducer) -> None:
        self._loop = asyncio.get_running_loop()
        self._client = producer.client
        self._sender = producer._sender
        self._accumulator = producer._message_accumulator
        self._silence = SilenceWatch(self._client, self._sender._request_timeout_ms / 1000)
        self._due: asyncio.Handle | None = None
        self._repeating: set[asyncio.Task[None]] = set()

    def add(self, tp: TopicPartition) -> Batch:
        """Add a batch behind those of its partition; it may be filled until it is taken."""
        accumulator = self._accumulator
        builder = Builder(accumulator._batch_size, accumulator._compression_type)
        batch = Batch(tp, builder, accumulator)
        accumulator._batches[tp].append(batch)
        if self._due is None:
            self._due = self._loop.call_soon(self._send)
        return batch

    def flush(self) -> None:
        """Send now what would be sent at the end of this turn of the loop."""
        if self._due is not None:
            self._due.cancel()
            self._send()

    def _send(self) -> None:
        """Send the oldest batch of every partition that has none on its way, one request per broker."""
        self._due = None
        accumulator, sender = self._accumulator, self._sender
        busy, muted = sender._in_flight, sender._muted_partitions
        leader_of = self._client.cluster.leader_for_partition
        connections: dict[int | None, AIOKafkaConnection | None] = {}
        parts: dict[int, dict[TopicPartition, Batch]] = {}
        for tp, queue in list(accumulator._batches.items()):
            leader = leader_of(tp)
            if tp in muted or leader in busy:
                continue
            if leader not in connections:
                has_leader = leader is not None and leader >= 0
                connections[leader] = open_connection(self._client, leader) if has_leader else None
                parts[leader] = {}
            if connections[leader] is not None:
                parts[leader][tp] = self._taken(tp, queue)
        for leader, batches in parts.items():
            if batches:
                self._request(leader, connections[leader], batches)
        if None in connections.values():
            accumulator._wakeup(accumulator.waiter())

    def _taken(self, tp: TopicPartition, queue: deque[Batch]) -> Batch:
        """Take the oldest batch of a partition from its queue."""
        accumulator = self._accumulator
        numbers = accumulator._txn_manager
        batch = queue[0]
        if type(batch) is not Batch or batch._retry_count or numbers is None:
            taken: Batch = accumulator._pop_batch(tp)
            return taken
        queue.popleft()
        if not queue:
            del accumulator._batches[tp]
        batch.take(numbers)
        return batch

    def _request(self, broker: int, connection: Any, batches: dict[TopicPartition, Batch]) -> None:
        sender = self._sender
        sender._in_flight.add(broker)
        sender._muted_partitions.update(batches)
        answer = PendingAnswer(
            partial(self._answered, broker, batches), partial(self._failed, broker, batches), time.monotonic()
        )
        try:
            message = version(ProduceRequest, connection._versions)
            if message is not None and message.API_VERSION in PRODUCE_VERSIONS:
                content = {tp: batch._builder._build() for tp, batch in batches.items()}
                body = encode_produce(sender._acks, sender._request_timeout_ms, content)
                send_encoded(connection, message, body, answer)
            else:
                send(connection, SendProduceReqHandler(sender, batches).create_request(), answer)
        except KafkaError as error:
            self._failed(broker, batches, error)
        else:
            self._silence.watch()

    def _answered(self, broker: int, batches: dict[TopicPartition, Batch], answer: Any) -> None:
        for _, partitions in answer.topics:
            for found in partitions:
                if found[1]:
                    self._leave(broker, batches, answer)
                    return
        try:
            if answer.API_VERSION in _WITH_START:
                for topic, partitions in answer.topics:
                    for partition, _, offset, timestamp, start in partitions:
                        if (batch := batches.get((topic, partition))) is not None:
                            batch.done(offset, timestamp, start)
            else:
                SendProduceReqHandler(self._sender, batches).handle_response(answer)
        except Exception as error:  # else nothing would ever be sent to this broker again
            self._accumulator.fail_all(error)
        self._is_free(broker, batches)

    def _failed(self, broker: int, batches: dict[TopicPartition, Batch], error: BaseException) -> None:
        known = error if isinstance(error, KafkaError) else KafkaConnectionError(str(error))
        self._leave(broker, batches, known)

    def _is_free(self, broker: int, batches: dict[TopicPartition, Batch]) -> None:
        self._sender._in_flight.discard(broker)
        self._sender._muted_partitions.difference_update(batches)
        if self._accumulator._batches:
            self._send()

    # ── what went wrong ──────────────────────────────────────────────────────────────────────────────────────────────

    def _leave(self, broker: int, batches: dict[TopicPartition, Batch], outcome: Any) -> None:
        """Let aiokafka's handler take the outcome of its request: an answer with an error, or an error."""
        handler = SendProduceReqHandler(self._sender, batches)
        handler._client = _Settled(handler._client, outcome)
        task = self._loop.create_task(handler.do(broker))
        self._repeating.add(task)
        task.add_done_callback(partial(self._left, broker, batches))

    def _left(self, broker: int, batches: dict[TopicPartition, Batch], task: asyncio.Task[None]) -> None:
        self._repeating.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._accumulator.fail_all(error)  # as aiokafka's sender does; the worker ends
        self._is_free(broker, batches)


class _Settled:
    """The client of a handler whose request has been sent, and has come to an end."""

    def __init__(self, client: Any, outcome: Any) -> None:
        self._client, self._outcome = client, outcome

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def send(self, node: int, request: Any) -> Any:
        """Return the answer, or raise the error."""
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        return self._outcome
