"""The programs that the worker and `serve` are compared with, each in a separate process.

    python -m worker.bench.baselines KIND BROKER PREFIX PARTITIONS
    python -m worker.bench.baselines aiohttp

`aiokafka` and `librdkafka` are echoes: they decode an arrival and write one decision, with the durability of the worker
(idempotent, all replicas). They plan nothing, keep no state, join no group and commit nothing. `faust` is the usual
Faust app with Faust's default settings: an agent that gets one record at a time, a table write and a `send` for each.
`aiohttp` is a plain aiohttp application that reads the body and answers a constant; it prints its URL.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import orjson
from confluent_kafka import OFFSET_BEGINNING, Consumer, Producer, TopicPartition

from worker.bench.stream import DIM
from worker.kafka.clients import NO_GROUP
from worker.kafka.connection import Connection
from worker.runtime.process import collect_garbage_rarely
from worker.stream.decoding import Limits, decode_arrival
from worker.stream.settings import LearningSettings
from worker.stream.topology import Topics

SLATE: Final = [f"ad-{index:02d}" for index in range(5)]
LIMITS: Final = Limits()
SETTINGS: Final = LearningSettings(dim=DIM)
MOST_RECORDS: Final = 2_048  # of a poll


def echo(value: bytes, timestamp: int) -> bytes:
    """Decode an arrival and return a decision.

    >>> orjson.loads(echo(b'{"session_id":"s","occurred_at":5,"context":[%b1]}' % (b"0," * (DIM - 1)), 5))["arm"]
    'ad-00'
    """
    event = decode_arrival(value, SETTINGS, limits=LIMITS, timestamp=timestamp)
    return orjson.dumps(decision(event.session_id, event.occurred_at))


def decision(session: str, arrived_at: int) -> dict[str, Any]:
    """Return a decision with the fields of those that the worker makes."""
    return {
        "session_id": session,
        "arrived_at": arrived_at,
        "position": 1,
        "arm": SLATE[0],
        "slate": SLATE,
        "mode": "exploit",
        "propensity": 1.0,
        "parameters_version": 1,
        "value": 0.25,
    }


def run_librdkafka(broker: str, names: Topics, partitions: int) -> None:
    """Echo on confluent-kafka."""
    connection = Connection(servers=(broker,))
    consumer = Consumer(connection.configuration(group_id=NO_GROUP, enable_auto_commit=False))
    # The queue has room for a whole backlog.
    producer = Producer(
        connection.configuration(
            acks="all", enable_idempotence=True, linger_ms=0, queue_buffering_max_messages=1_000_000
        )
    )
    consumer.assign([TopicPartition(names.arrivals, number, OFFSET_BEGINNING) for number in range(partitions)])
    while True:
        if (first := consumer.poll(0.2)) is not None:
            for message in (first, *consumer.consume(MOST_RECORDS, 0)):
                if message.error() is None:
                    value = echo(message.value(), message.timestamp()[1])
                    producer.produce(names.decisions, value, message.key(), message.partition())
        producer.poll(0)


def run_aiokafka(broker: str, names: Topics, partitions: int) -> None:
    """Echo on aiokafka."""
    from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
    from aiokafka import TopicPartition as Partition

    async def serve() -> None:
        consumer = AIOKafkaConsumer(
            bootstrap_servers=broker, auto_offset_reset="earliest", enable_auto_commit=False, group_id=None
        )
        producer = AIOKafkaProducer(bootstrap_servers=broker, enable_idempotence=True, acks="all", linger_ms=0)
        async with consumer, producer:
            consumer.assign([Partition(names.arrivals, number) for number in range(partitions)])
            while True:
                polled = await consumer.getmany(timeout_ms=200, max_records=MOST_RECORDS)
                for tp, records in polled.items():
                    for record in records:
                        value = echo(record.value, record.timestamp)
                        await producer.send(names.decisions, value, record.key, partition=tp.partition)

    asyncio.run(serve())


def run_faust(broker: str, names: Topics, partitions: int) -> None:
    """Run a Faust worker with one agent."""
    import faust

    app = faust.App(
        f"{names.prefix}-agent",
        broker=f"kafka://{broker}",
        store="memory://",
        value_serializer="json",
        autodiscover=False,
        web_enabled=False,
        # Faust creates this folder although it keeps nothing there; the default is the current folder.
        datadir=Path(tempfile.gettempdir()) / "adcascade-bench-agent",
        topic_disable_leader=True,
        topic_partitions=partitions,
    )
    arrivals = app.topic(names.arrivals, key_type=bytes)
    decisions = app.topic(names.decisions, key_type=bytes)
    table = app.Table("sessions", partitions=partitions)

    async def serve(stream: Any) -> None:
        async for event in stream.events():
            session = event.value["session_id"]
            table[session] = {"seen": 0, "clicked": False, "slate": SLATE}
            value = decision(session, event.value["occurred_at"])
            await decisions.send(key=event.key, value=value, partition=event.message.partition)

    app.agent(arrivals)(serve)
    worker = faust.Worker(app, loglevel="WARN", quiet=True, override_logging=False, redirect_stdouts=False)
    worker.spinner = None
    worker.execute_from_commandline()


def run_aiohttp() -> None:
    """Answer any request of a session with the same decision, over HTTP."""
    from aiohttp import web

    answer = orjson.dumps(decision("0" * 32, 1_700_000_000_000))

    async def handle(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=answer, content_type="application/json")

    async def serve() -> None:
        app = web.Application()
        app.router.add_post("/v1/sessions", handle)
        app.router.add_post("/v1/sessions/{session_id}/feedback", handle)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        sys.stdout.write(f"http://127.0.0.1:{runner.addresses[0][1]}\n")
        sys.stdout.flush()
        await asyncio.Event().wait()

    asyncio.run(serve())


if __name__ == "__main__":
    kind, *arguments = sys.argv[1:]
    if kind != "faust":
        collect_garbage_rarely()  # as the worker does
    if kind == "aiohttp":
        run_aiohttp()
    else:
        run = {"aiokafka": run_aiokafka, "librdkafka": run_librdkafka, "faust": run_faust}[kind]
        run(arguments[0], Topics(arguments[1]), int(arguments[2]))
