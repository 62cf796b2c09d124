"""Two ways to do without this package, to compare with; each runs in a process of its own.

    python -m worker.lab.bench_kafka_children '{"kind": "raw", …}'

`raw` is the wire: aiokafka's `getmany`, then `create_batch` and `send_batch`. It writes as many records of the same
sizes as the worker does, and knows nothing. `agent` is what one writes first with Faust, under Faust's own settings: an
agent over both topics, JSON, a table write and a `send` for each event.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from worker.runners.faust.memory import collect_rarely


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What a child is told.

    Sizes are in bytes. `changes` and `decisions` say how many of them an arrival and a click lead to, on average.
    """

    kind: str
    broker: str
    inputs: str
    outputs: str
    partitions: int
    opened: int
    feedback: int
    changelog: int
    decision: int
    changes: tuple[float, float]
    decisions: tuple[float, float]


# ── raw ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Wire:
    """Turns input records into output records of the right sizes, as fast as the client library goes."""

    def __init__(self, task: Task, producer: AIOKafkaProducer) -> None:
        self._task = task
        self._producer = producer
        self._opened, self._feedback = bytes(task.opened), bytes(task.feedback)
        self._changed = bytes(task.changelog)
        self._first, self._next = (_decision(task, position) for position in (1, 2))
        self._owed = {"changes": 0.0, "decisions": 0.0}

    async def handle(self, fetched: dict[TopicPartition, list[Any]]) -> None:
        """Write what the records of one poll lead to."""
        task, outputs = self._task, self._task.outputs
        facts: list[tuple[bytes, bytes]] = []
        for tp, records in fetched.items():
            keys = [record.key for record in records]
            if tp.topic.endswith(".arrivals"):
                fact, decision, kind = self._opened, self._first, 0
            else:
                fact, decision, kind = self._feedback, self._next, 1
            changed = self._share("changes", keys, task.changes[kind])
            decided = self._share("decisions", keys, task.decisions[kind])
            await self._write(f"{outputs}.sessions-changelog", tp.partition, [(key, self._changed) for key in changed])
            await self._write(f"{outputs}.decisions", tp.partition, [(key, decision) for key in decided])
            facts += [(key, fact) for key in keys]
        # Once for all partitions: `send_batch` waits until the batch before it to the same partition is on its way.
        await self._write(f"{outputs}.journal", 0, facts)

    def _share(self, what: str, keys: list[bytes], share: float) -> list[bytes]:
        """Return so many of the keys; what is less than one is kept for the next time."""
        owed = self._owed[what] + len(keys) * share
        self._owed[what] = owed - int(owed)
        return keys[: int(owed)]

    async def _write(self, topic: str, partition: int, pairs: list[tuple[bytes, bytes]]) -> None:
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


def _decision(task: Task, position: int) -> bytes:
    return (b'{"position":%d,' % position).ljust(task.decision, b" ")


async def raw(task: Task) -> None:
    """Consume and produce until the process is ended."""
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
        consumer.assign([TopicPartition(topic, place) for topic in topics for place in range(task.partitions)])
        wire = Wire(task, producer)
        while True:
            await wire.handle(await consumer.getmany(timeout_ms=200))


# ── the idiomatic agent ──────────────────────────────────────────────────────────────────────────────────────────────


def agent(task: Task) -> None:
    """Run a plain Faust worker until the process is ended."""
    import faust

    app = faust.App(
        f"{task.outputs}-agent",
        broker=f"kafka://{task.broker}",
        store="memory://",
        value_serializer="json",
        autodiscover=False,
        web_enabled=False,
        # Faust makes it though it keeps nothing there, in the current folder unless told otherwise.
        datadir=Path(tempfile.gettempdir()) / "adcascade-bench-agent",
        topic_disable_leader=True,
        topic_partitions=task.partitions,
    )
    inputs = app.topic(f"{task.inputs}.arrivals", f"{task.inputs}.clicks", key_type=bytes)
    decisions = app.topic(f"{task.outputs}.decisions", key_type=bytes)
    table = app.Table("sessions", partitions=task.partitions)
    slate = [f"ad-{place:02d}" for place in range(5)]

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
    """Run what the argument says."""
    task = msgspec.json.decode(argument, type=Task)
    if task.kind == "raw":
        collect_rarely()  # as the worker does
        asyncio.run(raw(task))
    else:
        agent(task)


if __name__ == "__main__":
    main(sys.argv[1])
