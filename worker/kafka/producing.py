"""What an idempotent producer has gathered, sent without its tasks.

For every request aiokafka wakes its sender, starts a task with a timer, and wakes a third task that reads the answer.
Here a request leaves at the end of the turn in which its records were written, and its answer is handled by the call
that reads its bytes (see `worker.kafka.direct`).

Rules that hold in this file:

- A broker has one request at a time, and so has a partition. What is written meanwhile goes together in the next one.
- Sequence numbers, batches and the judgement of answers are aiokafka's. An answer with an error, and a request that was
  not answered, go to its own handler, in a task: it repeats what can be repeated, with the same numbers.
- Without a connection or a leader, aiokafka's sender sends. Both use the same marks of what is on its way.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from aiokafka import AIOKafkaProducer
from aiokafka.conn import AIOKafkaConnection
from aiokafka.errors import KafkaConnectionError, KafkaError
from aiokafka.producer.message_accumulator import BatchBuilder, MessageBatch
from aiokafka.producer.sender import SendProduceReqHandler
from aiokafka.structs import TopicPartition

from worker.kafka.direct import PendingAnswer, SilenceWatch, open_connection, send


class Acknowledgement:
    """The end of a batch: like a future, but its callbacks are called at once, not in a turn of the loop for each.

    >>> end = Acknowledgement()
    >>> end.add_done_callback(lambda ended: print(ended.result()))
    >>> end.set_result("written")
    written
    """

    __slots__ = ("_callbacks", "_done", "_error", "_result")

    def __init__(self) -> None:
        self._callbacks: list[Callable[[Any], object]] = []
        self._done = False
        self._result: Any = None
        self._error: BaseException | None = None

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
        self._result = result
        self._end()

    def set_exception(self, error: BaseException) -> None:
        """End with an error."""
        self._error = error
        self._end()

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Call a function at the end, with this."""
        if self._done:
            callback(self)
        else:
            self._callbacks.append(callback)

    def remove_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Do not call a function at the end."""
        self._callbacks = [one for one in self._callbacks if one != callback]

    def _end(self) -> None:
        self._done = True
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)


class Batch(MessageBatch):  # type: ignore[misc]
    """A batch without futures of the loop."""

    def __init__(self, tp: TopicPartition, builder: BatchBuilder, ttl: float) -> None:
        self._builder, self._tp, self._ttl, self._linger_time = builder, tp, ttl, 0.0
        self._ctime = time.monotonic()
        self.future, self._drain_waiter = Acknowledgement(), Acknowledgement()
        self._msg_futures: list[Any] = []
        self._retry_count = 0

    def reset_drain(self) -> None:
        """Wait for another request."""
        self._drain_waiter = Acknowledgement()


class ProduceRequests:
    """Sends the batches of a started producer, in its own loop."""

    def __init__(self, producer: AIOKafkaProducer) -> None:
        self._loop = asyncio.get_running_loop()
        self._client = producer.client
        self._sender = producer._sender
        self._accumulator = producer._message_accumulator
        self._silence = SilenceWatch(self._client, self._sender._request_timeout_ms / 1000)
        self._is_due = False
        self._repeating: set[asyncio.Task[None]] = set()

    def add(self, builder: BatchBuilder, tp: TopicPartition) -> Batch:
        """Add a batch, which may still be filled in this turn of the loop, behind those of its partition."""
        accumulator = self._accumulator
        batch = Batch(tp, builder, accumulator._batch_ttl)
        accumulator._batches[tp].append(batch)
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._send)
        return batch

    def _send(self) -> None:
        """Send the oldest batch of every partition that has none on its way, one request per broker."""
        self._is_due = False
        accumulator, sender = self._accumulator, self._sender
        busy, muted = sender._in_flight, sender._muted_partitions
        leader_of = self._client.cluster.leader_for_partition
        connections: dict[int | None, AIOKafkaConnection | None] = {}
        parts: dict[int, dict[TopicPartition, Batch]] = {}
        for tp in list(accumulator._batches):
            leader = leader_of(tp)
            if tp in muted or leader in busy:
                continue
            if leader not in connections:
                has_leader = leader is not None and leader >= 0
                connections[leader] = open_connection(self._client, leader) if has_leader else None
            if connections[leader] is not None:
                parts.setdefault(leader, {})[tp] = accumulator._pop_batch(tp)
        for leader, batches in parts.items():
            self._request(leader, connections[leader], batches)
        if None in connections.values():
            accumulator._wakeup(accumulator.waiter())

    def _request(self, broker: int, connection: Any, batches: dict[TopicPartition, Batch]) -> None:
        self._sender._in_flight.add(broker)
        self._sender._muted_partitions.update(batches)
        handler = SendProduceReqHandler(self._sender, batches)
        answer = PendingAnswer(
            partial(self._answered, broker, handler), partial(self._failed, broker, handler), self._loop.time()
        )
        try:
            send(connection, handler.create_request(), answer)
        except KafkaError as error:
            self._failed(broker, handler, error)
        else:
            self._silence.watch()

    def _answered(self, broker: int, handler: Any, answer: Any) -> None:
        if any(found[1] for _, partitions in answer.topics for found in partitions):
            self._leave(broker, handler, answer)
            return
        try:
            handler.handle_response(answer)
        except Exception as error:  # else nothing would ever be sent to this broker again
            self._accumulator.fail_all(error)
        self._is_free(broker, handler)

    def _failed(self, broker: int, handler: Any, error: BaseException) -> None:
        known = error if isinstance(error, KafkaError) else KafkaConnectionError(str(error))
        self._leave(broker, handler, known)

    def _is_free(self, broker: int, handler: Any) -> None:
        self._sender._in_flight.discard(broker)
        self._sender._muted_partitions.difference_update(handler._batches)
        if self._accumulator._batches:
            self._send()

    # ── what went wrong ──────────────────────────────────────────────────────────────────────────────────────────────

    def _leave(self, broker: int, handler: Any, outcome: Any) -> None:
        """Let aiokafka's handler take the outcome of its request: an answer with an error, or an error."""
        handler._client = _Settled(handler._client, outcome)
        task = self._loop.create_task(handler.do(broker))
        self._repeating.add(task)
        task.add_done_callback(partial(self._left, broker, handler))

    def _left(self, broker: int, handler: Any, task: asyncio.Task[None]) -> None:
        self._repeating.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._accumulator.fail_all(error)  # as aiokafka's sender does; the worker ends
        self._is_free(broker, handler)


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
