"""What the worker is compared with; each baseline runs in a process of its own.

    python -m worker.bench.kafka.baselines '{"kind": "raw", …}'

`raw` is aiokafka's `getmany`, then `create_batch` and `send_batch`. It decodes and encodes record by record with the
functions of `worker.stream` (the worker encodes many in one call), writes as many records of the same sizes as
the worker, and keeps no state. `wire` leaves out the codec: bytes in, other bytes out. `agent` is the usual Faust
agent, with Faust's default settings: one agent over both topics, JSON, a table write and a `send` for each event.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import orjson
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from worker.kafka.memory import collect_garbage_rarely
from worker.stream.contexts import unpack_context
from worker.stream.decoding import Limits, decode_arrival, decode_feedback
from worker.stream.encoding import encode_feedback_fact, opened_document
from worker.stream.session import Session, decode_state, encode_state

Pair = tuple[bytes, bytes]


class OutputSizes(NamedTuple):
    """Mean sizes of the records that the worker writes, in bytes."""

    opened: int
    feedback: int
    changelog: int
    decision: int


class BaselineTask(msgspec.Struct, frozen=True, kw_only=True):
    """Task of a baseline.

    `state` is the table value of a session. `changes` and `decisions` are how many of them an arrival and a click lead
    to, on average.
    """

    kind: str
    broker: str
    inputs: str
    outputs: str
    partitions: int
    sizes: OutputSizes
    changes: tuple[float, float]
    decisions: tuple[float, float]
    state: bytes


# ── raw ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


class WireBaseline:
    """Turn input records into output records of the right sizes, as fast as the client library can."""

    def __init__(self, task: BaselineTask, producer: AIOKafkaProducer) -> None:
        self._task = task
        self._producer = producer
        self._owed = {"changes": 0.0, "decisions": 0.0}
        self._opened, self._feedback = bytes(task.sizes.opened), bytes(task.sizes.feedback)
        self._changed = bytes(task.sizes.changelog)
        self._first, self._next = (_decision(task, position) for position in (1, 2))

    async def handle(self, fetched: dict[TopicPartition, list[Any]]) -> None:
        """Write the output of the records of one poll."""
        task, outputs = self._task, self._task.outputs
        facts: list[Pair] = []
        for tp, records in fetched.items():
            arrivals = tp.topic.endswith(".arrivals")
            changed = self._share("changes", records, task.changes[not arrivals])
            decided = self._share("decisions", records, task.decisions[not arrivals])
            facts += self._facts(records, arrivals)
            await self._write(f"{outputs}.sessions-changelog", tp.partition, self._changes(changed))
            await self._write(f"{outputs}.decisions", tp.partition, self._decisions(decided, arrivals))
        # Once for all partitions: `send_batch` waits until the last batch to the same partition has been sent.
        await self._write(f"{outputs}.journal", 0, facts)

    def _facts(self, records: list[Any], arrivals: bool) -> list[Pair]:
        fact = self._opened if arrivals else self._feedback
        return [(record.key, fact) for record in records]

    def _changes(self, records: list[Any]) -> list[Pair]:
        return [(record.key, self._changed) for record in records]

    def _decisions(self, records: list[Any], arrivals: bool) -> list[Pair]:
        decision = self._first if arrivals else self._next
        return [(record.key, decision) for record in records]

    def _share(self, kind: str, records: list[Any], share: float) -> list[Any]:
        """Return a share of the records; fractions of a record carry over to the next poll."""
        owed = self._owed[kind] + len(records) * share
        self._owed[kind] = owed - int(owed)
        return records[: int(owed)]

    async def _write(self, topic: str, partition: int, pairs: list[Pair]) -> None:
        if not pairs:
            return
        producer = self._producer
        builder = producer.create_batch()
        for key, value in pairs:
            if builder.append(timestamp=None, key=key, value=value) is None:
                await producer.send_batch(builder, topic, partition=partition)
                builder = producer.create_batch()
                builder.append(timestamp=None, key=key, value=value)
        await producer.send_batch(builder, topic, partition=partition)


class CodecBaseline(WireBaseline):
    """Also decode the input and encode the output, from one session that stands for all."""

    def __init__(self, task: BaselineTask, producer: AIOKafkaProducer) -> None:
        super().__init__(task, producer)
        session = decode_state(task.state)
        assert isinstance(session, Session)
        self._session = session
        self._context = unpack_context(session.context)
        self._limits = Limits()

    def _facts(self, records: list[Any], arrivals: bool) -> list[Pair]:
        limits, one, context, horizon = self._limits, self._session, self._context, len(self._session.slate)
        facts: list[Pair] = []
        for record in records:
            if arrivals:
                event = decode_arrival(record.value, limits=limits, dim=len(context), timestamp=record.timestamp)
                opened = opened_document(
                    event.session_id, event.occurred_at, context, one.slate, one.modes, (), one.version
                )
                fact = orjson.dumps(opened)
            else:
                fact = encode_feedback_fact(
                    decode_feedback(record.value, limits=limits, horizon=horizon, timestamp=record.timestamp)
                )
            facts.append((record.key, fact))
        return facts

    def _changes(self, records: list[Any]) -> list[Pair]:
        return [(record.key, encode_state(self._session)) for record in records]

    def _decisions(self, records: list[Any], arrivals: bool) -> list[Pair]:
        self._session.passed = 0 if arrivals else 1
        return [(record.key, orjson.dumps(self._session.decision(record.key.decode(), None))) for record in records]


def _decision(task: BaselineTask, position: int) -> bytes:
    return (b'{"position":%d,' % position).ljust(task.sizes.decision, b" ")


async def raw(task: BaselineTask) -> None:
    """Consume and produce until the process is killed."""
    consumer = AIOKafkaConsumer(
        bootstrap_servers=task.broker,
        auto_offset_reset="earliest",
        enable_auto_commit=False,
        fetch_max_wait_ms=100,
    )
    producer = AIOKafkaProducer(
        bootstrap_servers=task.broker, enable_idempotence=True, acks="all", max_batch_size=512 << 10
    )
    async with consumer, producer:
        topics = (f"{task.inputs}.arrivals", f"{task.inputs}.clicks")
        consumer.assign([TopicPartition(topic, number) for topic in topics for number in range(task.partitions)])
        wire = (CodecBaseline if task.kind == "raw" else WireBaseline)(task, producer)
        while True:
            await wire.handle(await consumer.getmany(timeout_ms=200, max_records=16384))


# ── the idiomatic agent ──────────────────────────────────────────────────────────────────────────────────────────────


def agent(task: BaselineTask) -> None:
    """Run a plain Faust worker until the process is killed."""
    import faust

    app = faust.App(
        f"{task.outputs}-agent",
        broker=f"kafka://{task.broker}",
        store="memory://",
        value_serializer="json",
        autodiscover=False,
        web_enabled=False,
        # Faust creates this folder although it keeps nothing there; the default is the current folder.
        datadir=Path(tempfile.gettempdir()) / "adcascade-bench-agent",
        topic_disable_leader=True,
        topic_partitions=task.partitions,
    )
    inputs = app.topic(f"{task.inputs}.arrivals", f"{task.inputs}.clicks", key_type=bytes)
    decisions = app.topic(f"{task.outputs}.decisions", key_type=bytes)
    table = app.Table("sessions", partitions=task.partitions)
    slate = [f"ad-{index:02d}" for index in range(5)]

    async def serve(stream: Any) -> None:
        async for event in stream.events():
            value: dict[str, Any] = event.value
            session, position = value["session_id"], value.get("position", 0)
            table[session] = {"seen": position, "clicked": value.get("clicked", False), "slate": slate}
            decision = {
                "position": position + 1,
                "session_id": session,
                "arrived_at": value["occurred_at"],
                "arm": slate[0],
                "slate": slate,
                "mode": "exploit",
                "propensity": 1.0,
                "parameters_version": 1,
                "value": 0.25,
            }
            await decisions.send(key=event.key, value=decision, partition=event.message.partition)

    app.agent(inputs)(serve)
    worker = faust.Worker(app, loglevel="WARN", quiet=True, override_logging=False, redirect_stdouts=False)
    worker.spinner = None
    worker.execute_from_commandline()


def main(argument: str) -> None:
    """Run the baseline of the argument."""
    task = msgspec.json.decode(argument, type=BaselineTask)
    if task.kind in ("raw", "wire"):
        collect_garbage_rarely()  # as the worker does
        asyncio.run(raw(task))
    else:
        agent(task)


if __name__ == "__main__":
    main(sys.argv[1])
