"""Measures the transport against its neighbours, on a real broker, in one run with the same records and the same work.

(a) raw: aiokafka `getmany`, then `create_batch`/`send_batch`, no group, no order of writing, no table;
(b) idiomatic: a Faust agent with a table write and a send per event;
(c) batch: this package.

    python tests/kafka/measure.py --servers 127.0.0.1:9092 [--events 300000] [--json FILE]

First a backlog flat out (events/s and CPU per event), then live at half of each one's rate: time from sending an
arrival to having its decision, as a client sees it. All three run with the same settings of the garbage collector.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import orjson
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from worker.runners.faust.names import TopicNames
from worker.runners.faust.ports import Emits, Lessons, Publication, Record

PARTITIONS = 8
CONTEXT = [round(0.123456789 * n - 1, 9) for n in range(16)]


class Sessions:
    """About the bytes and the codec work of real serving: decode, join, journal, changelog, decision; no planning."""

    def __init__(self, partition: int, partitions: int) -> None:
        self.state: dict[bytes, list[Any]] = {}

    def restore(self, items: Iterable[tuple[bytes, bytes]]) -> None:
        self.state.update((key, orjson.loads(value)) for key, value in items)

    def handle(self, records: Sequence[Record]) -> Emits:
        emits = Emits()
        touched = {}
        loads, dumps, journal = orjson.loads, orjson.dumps, emits.journal
        for record in records:
            key: Any = record.key
            event = loads(record.value)  # type: ignore[arg-type]
            state = self.state.get(key)
            if state is None:
                state = self.state[key] = [None, 99, 0]
            if "context" in event:
                state[0] = event["context"]
                fact = {"kind": "opened", "slate": [1, 2, 3, 4, 5], **event}
            else:
                state[2] = max(state[2], event["position"])
                fact = {"kind": "feedback", **event}
            journal.append((key, dumps(fact)))
            touched[key] = (state, event)
        for key, (state, event) in touched.items():
            emits.changelog.append((key, dumps(state)))
            decision = {"session_id": event["session_id"], "position": state[2] + 1, "slate": ["a1", "a2", "a3", "a4"]}
            emits.decisions.append(
                (key, dumps({**decision, "mode": "exploit", "value": 0.25, "sent": event.get("sent")}))
            )
        return emits

    def acknowledged(self, progress_time: int) -> None:
        pass

    def release(self) -> None:
        pass


class Nothing:
    """Neither parameters nor a learner."""

    version = -1
    resume_offset = 0

    def handle(self, records: Sequence[Record]) -> Any:
        return Lessons()

    def begin(self) -> Lessons:
        return Lessons()

    def check_start(self, first: int, end: int) -> None:
        pass

    def wants(self, publication: Publication) -> bool:
        return False


def arrival(number: int, sent: int | None = None) -> tuple[bytes, bytes]:
    session = f"session-{number:09d}"
    body: dict[str, Any] = {"session_id": session, "occurred_at": 1_700_000_000_000 + number, "context": CONTEXT}
    if sent is not None:
        body["sent"] = sent
    return session.encode(), orjson.dumps(body)


def click(number: int) -> tuple[bytes, bytes]:
    session = f"session-{number:09d}"
    body = {
        "session_id": session,
        "occurred_at": 1_700_000_000_000 + number,
        "position": 1,
        "arm": "a1",
        "clicked": False,
    }
    return session.encode(), orjson.dumps(body)


async def create_topics(servers: list[str], names: TopicNames) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=servers)
    await admin.start()
    many = (names.arrivals, names.clicks, names.decisions, names.changelog, names.dead_letters)
    one = (names.journal, names.parameters, names.episodes)
    await admin.create_topics([NewTopic(name, PARTITIONS if name in many else 1, 1) for name in (*many, *one)])
    await admin.close()


async def produce(servers: list[str], topic: str, pairs: Iterable[tuple[bytes, bytes]]) -> None:
    """Write pairs to the partition that is the number of the pair modulo the partitions, in large batches."""
    async with AIOKafkaProducer(bootstrap_servers=servers, max_batch_size=500_000) as producer:
        builders = [producer.create_batch() for _ in range(PARTITIONS)]
        sent = []
        for number, (key, value) in enumerate(pairs):
            partition = number % PARTITIONS
            if builders[partition].append(timestamp=None, key=key, value=value) is None:
                sent.append(await producer.send_batch(builders[partition], topic, partition=partition))
                builders[partition] = producer.create_batch()
                builders[partition].append(timestamp=None, key=key, value=value)
        for partition, builder in enumerate(builders):
            sent.append(await producer.send_batch(builder, topic, partition=partition))
        await asyncio.gather(*sent)


class Meter:
    """Events, seconds and CPU between the first record and the last acknowledgement."""

    def __init__(self, expected: int) -> None:
        self.expected = expected
        self._begun: tuple[float, float] | None = None
        self._last: tuple[float, float] = (0.0, 0.0)

    def begin(self) -> None:
        if self._begun is None:
            self._begun = self._now()

    def report(self) -> None:
        assert self._begun is not None
        wall, cpu = (end - start for start, end in zip(self._begun, self._now(), strict=True))
        sys.stdout.write(json.dumps({"events": self.expected, "seconds": wall, "cpu": cpu}) + "\n")
        sys.stdout.flush()

    @staticmethod
    def _now() -> tuple[float, float]:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return time.monotonic(), used.ru_utime + used.ru_stime


# ── the three ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def raw(servers: list[str], names: TopicNames, expected: int) -> None:
    meter = Meter(expected)
    consumer = AIOKafkaConsumer(
        bootstrap_servers=servers, auto_offset_reset="earliest", max_partition_fetch_bytes=256 << 10
    )
    producer = AIOKafkaProducer(bootstrap_servers=servers, enable_idempotence=True, acks="all", max_batch_size=500_000)
    await consumer.start()
    await producer.start()
    consumer.assign([TopicPartition(t, p) for t in (names.arrivals, names.clicks) for p in range(PARTITIONS)])
    tasks = {p: Sessions(p, PARTITIONS) for p in range(PARTITIONS)}
    done, pending = 0, set()

    async def write(topic: str, partition: int, pairs: Sequence[tuple[Any, Any]]) -> None:
        builder = producer.create_batch()
        for key, value in pairs:
            if builder.append(timestamp=None, key=key, value=value) is None:
                pending.add(await producer.send_batch(builder, topic, partition=partition))
                builder = producer.create_batch()
                builder.append(timestamp=None, key=key, value=value)
        pending.add(await producer.send_batch(builder, topic, partition=partition))

    while True:
        fetched = await consumer.getmany(timeout_ms=200)
        for tp, records in fetched.items():
            meter.begin()
            emits = tasks[tp.partition].handle(records)
            await write(names.journal, 0, emits.journal)
            await write(names.changelog, tp.partition, emits.changelog)
            await write(names.decisions, tp.partition, emits.decisions)
            done += len(records)
        pending = {future for future in pending if not future.done()}
        if expected and done >= expected:
            await asyncio.gather(*pending)
            meter.report()
            break
    await consumer.stop()
    await producer.stop()


def idiomatic(servers: list[str], names: TopicNames, expected: int, group: str) -> None:
    import faust

    meter = Meter(expected)
    app = faust.App(
        group,
        broker=f"kafka://{servers[0]}",
        store="memory://",
        web_enabled=False,
        topic_disable_leader=True,
        topic_partitions=PARTITIONS,
        stream_buffer_maxsize=65536,
        broker_max_poll_records=500,
        producer_linger=0.005,
        producer_acks=-1,
        datadir=f"/tmp/{group}",
        autodiscover=False,
    )
    inputs = app.topic(names.arrivals, names.clicks, key_type=bytes, value_type=bytes, value_serializer="raw")
    decisions = app.topic(names.decisions, key_type=bytes, value_serializer="raw")
    journal = app.topic(names.journal, key_type=bytes, value_serializer="raw")
    table = app.Table("sessions", key_type=bytes, value_type=bytes, partitions=PARTITIONS)
    count = 0

    async def serve(stream: Any) -> None:
        nonlocal count
        task = Sessions(0, PARTITIONS)
        async for event in stream.events():
            meter.begin()
            message = event.message
            record = Record(message.topic, message.partition, message.offset, 0, event.key, event.value)
            emits = task.handle([record])
            for key, value in emits.changelog:
                table[key] = value
            for _, fact in emits.journal:
                await journal.send(key=event.key, value=fact)
            for key, value in emits.decisions:
                await decisions.send(key=key, value=value, partition=message.partition)
            count += 1
            if expected and count >= expected:
                await app.producer.flush()
                meter.report()
                os._exit(0)

    app.agent(inputs)(serve)
    faust.Worker(
        app, loglevel="WARN", quiet=True, override_logging=False, redirect_stdouts=False
    ).execute_from_commandline()


def batch(servers: list[str], names: TopicNames, expected: int, group: str, options: dict[str, Any]) -> None:
    from mode import Service

    from tests.kafka.toy import progress
    from worker.runners.faust.app import Options, build, run
    from worker.runners.faust.connection import Connection
    from worker.runners.faust.ports import Ports

    meter = Meter(expected)

    class Timed(Sessions):
        def handle(self, records: Sequence[Record]) -> Emits:
            if records:
                meter.begin()
            return super().handle(records)

    ports = Ports(
        serve=Timed, parameters=Nothing(), learn=Nothing, progress=progress, clock=lambda: time.time_ns() // 1_000_000
    )
    if options.pop("uvloop", False):
        import uvloop

        uvloop.install()
    connection = Connection(servers=tuple(servers))
    learning = options.pop("learning", False)
    app = build(Options(connection=connection, names=names, group=group, **options), ports, partitions=PARTITIONS)
    if not learning:
        app.seat.assign = lambda mine: None  # type: ignore[method-assign]

    class Watch(Service):
        @Service.task
        async def _watch(self) -> None:
            while not self.should_stop:
                await self.sleep(0.01)
                if expected and sum(app.serving.committable().values()) >= expected:
                    meter.report()
                    os._exit(0)

    app.companions = (*app.companions, Watch())
    run(app)


# ── live ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def live(servers: list[str], names: TopicNames, rate: float, seconds: float) -> dict[str, float]:
    """Send arrivals at a rate, read the decisions, and return quantiles of the time between."""
    warm = 3.0
    consumer = AIOKafkaConsumer(bootstrap_servers=servers, auto_offset_reset="latest", fetch_max_wait_ms=100)
    await consumer.start()
    tps = [TopicPartition(names.decisions, p) for p in range(PARTITIONS)]
    consumer.assign(tps)
    await consumer.seek_to_end(*tps)
    for tp in tps:
        await consumer.position(tp)
    latencies: list[float] = []
    sending = True
    count = answered = 0

    async def read() -> None:
        nonlocal answered
        while sending or answered < count:
            for records in (await consumer.getmany(timeout_ms=100)).values():
                now = time.monotonic_ns()
                answered += len(records)
                for record in records[:: max(1, len(records) // 4)]:
                    sent = orjson.loads(record.value)["sent"]
                    if sent is not None and sent > begun_ns + warm * 1e9:
                        latencies.append((now - sent) / 1e6)

    begun, begun_ns = time.monotonic(), time.monotonic_ns()
    reader = asyncio.create_task(read())
    async with AIOKafkaProducer(bootstrap_servers=servers, max_batch_size=500_000, linger_ms=1) as producer:
        base = int(time.time()) * 100_000_000
        while (elapsed := time.monotonic() - begun) < warm + seconds:
            due = int(elapsed * rate) - count
            if due > 0:
                builders: dict[int, Any] = {}
                for number in range(count, count + due):
                    key, value = arrival(base + number, time.monotonic_ns())
                    builder = builders.setdefault(number % PARTITIONS, None) or producer.create_batch()
                    builders[number % PARTITIONS] = builder
                    builder.append(timestamp=None, key=key, value=value)
                for partition, builder in builders.items():
                    await producer.send_batch(builder, names.arrivals, partition=partition)
                count += due
            await asyncio.sleep(0.004)
    sending = False
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(reader, 30)
    await consumer.stop()
    if len(latencies) < 10:
        return {"p50": float("nan"), "p99": float("nan"), "sent": count, "answered": answered}
    cuts = statistics.quantiles(latencies, n=100)
    return {"p50": cuts[49], "p99": cuts[98], "rate": rate, "sent": count, "answered": answered}


# ── the run ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def spawn(kind: str, servers: list[str], prefix: str, expected: int, **options: Any) -> subprocess.Popen[str]:
    root = Path(__file__).parents[2]
    argument = json.dumps(
        {"kind": kind, "servers": servers, "prefix": prefix, "expected": expected, "options": options}
    )
    return subprocess.Popen(
        [sys.executable, "-m", "tests.kafka.measure", "--child", argument], cwd=root, stdout=subprocess.PIPE, text=True
    )


def child(argument: dict[str, Any]) -> None:
    servers, names, expected = argument["servers"], TopicNames(argument["prefix"]), argument["expected"]
    group = f"{argument['prefix']}-{argument['kind']}"
    gc.set_threshold(100_000, 50, 100)
    if argument["kind"] == "raw":
        asyncio.run(raw(servers, names, expected))
    elif argument["kind"] == "idiomatic":
        idiomatic(servers, names, expected, group)
    else:
        batch(servers, names, expected, group, argument["options"])


def measure(
    servers: list[str], events: int, few: int, seconds: float, kinds: Sequence[str], options: dict[str, Any]
) -> Any:
    results: dict[str, Any] = {}
    for kind in kinds:
        amount = few if kind == "idiomatic" else events
        prefix = f"m{time.time_ns() // 1_000_000}{kind}"
        names = TopicNames(prefix)
        asyncio.run(create_topics(servers, names))
        asyncio.run(produce(servers, names.arrivals, (arrival(number) for number in range(amount // 2))))
        asyncio.run(produce(servers, names.clicks, (click(number) for number in range(amount // 2))))
        process = spawn(kind, servers, prefix, amount // 2 * 2, **options)
        # Faust's spinner may have left an escape sequence before it.
        line = json.loads("{" + process.communicate(timeout=90)[0].rpartition("{")[2])
        result = {
            "events_per_second": line["events"] / line["seconds"],
            "cpu_us_per_event": line["cpu"] / line["events"] * 1e6,
        }
        if seconds:
            prefix += "live"
            asyncio.run(create_topics(servers, TopicNames(prefix)))
            process = spawn(kind, servers, prefix, 0, **options)
            try:
                result |= asyncio.run(
                    _live_when_up(servers, TopicNames(prefix), result["events_per_second"] / 2, seconds)
                )
            finally:
                process.terminate()
                process.wait(30)
        results[kind] = result
        sys.stderr.write(f"{kind} { {name: round(value, 2) for name, value in result.items()} }\n")
    return results


async def _live_when_up(servers: list[str], names: TopicNames, rate: float, seconds: float) -> dict[str, float]:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:  # a few arrivals until the first decision comes
        first = await live(servers, names, 20, -2.5)
        if first["answered"]:
            break
    return await live(servers, names, rate, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", nargs="+")
    parser.add_argument("--events", type=int, default=300_000)
    parser.add_argument("--few", type=int, default=10_000, help="events for the idiomatic agent")
    parser.add_argument("--seconds", type=float, default=10.0, help="of live traffic, 0 for none")
    parser.add_argument("--kinds", nargs="+", default=["raw", "idiomatic", "batch"])
    parser.add_argument("--options", type=json.loads, default={}, help="JSON, for the batch worker")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child)
        return
    results = measure(
        arguments.servers, arguments.events, arguments.few, arguments.seconds, arguments.kinds, arguments.options
    )
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
