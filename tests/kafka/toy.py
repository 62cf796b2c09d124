"""A worker with a small deterministic processor and without a learner, to test the transport.

State per key: the numbers of its arrivals and of its clicks, as sets, so that a repeat changes nothing. Every record
goes to the journal, the state to decisions and changelog.
Run as a process: ``python -m tests.kafka.toy '{"servers": […], "prefix": …}'``.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import orjson

from worker.child import command
from worker.kafka.connection import Connection
from worker.kafka.faust.client import Client
from worker.kafka.faust.link import FaustOptions
from worker.kafka.faust.transport import FaustTransport
from worker.kafka.parameters import PublishedParameters
from worker.kafka.pipeline import PartitionPipeline
from worker.kafka.processors import StreamProcessors
from worker.kafka.topics import input_partitions
from worker.kafka.worker import PipelineSettings, Worker
from worker.kafka.writer import TopicWriter
from worker.metrics import Metrics
from worker.stream.decoding import Limits
from worker.stream.parameters import Parameters
from worker.stream.settings import LearningSettings
from worker.stream.topology import DeadLetter, Emits, Record, Topics

#: In place of the learner: a process that ends with its standard input.
NO_LEARNER = (sys.executable, "-c", "import sys; sys.stdin.read()")


class Joins:
    """The task of a partition."""

    #: The number of values that the tasks of this process have taken from the table.
    restored = 0

    def __init__(self) -> None:
        self.state: dict[bytes, tuple[set[int], set[int]]] = {}

    def take_over(self, start: int, end: int) -> None:
        pass

    def restore(self, records: Iterable[Record]) -> None:
        for record in records:
            assert record.key is not None and record.value is not None
            arrivals, clicks = orjson.loads(record.value)
            self.state[record.key] = (set(arrivals), set(clicks))
            Joins.restored += 1

    def handle(self, records: Sequence[Record]) -> Emits:
        emits = Emits()
        touched: dict[bytes, None] = {}
        for record in records:
            key = record.key
            try:
                event = orjson.loads(record.value or b"")
                number = event["n"]
                if key is None:
                    raise ValueError("no key")
            except (ValueError, KeyError, TypeError):
                emits.dead_letters.append(DeadLetter(key, record.value, [("adcascade.reason", b"undecodable")]))
                continue
            if event.get("explode"):
                raise ZeroDivisionError("as requested")
            state = self.state.get(key)
            if state is None:
                state = self.state[key] = (set(), set())
            state[record.topic.endswith("clicks")].add(number)
            touched[key] = None
            emits.journal.append((key, orjson.dumps({"kind": record.topic, "n": number})))
        for key in touched:
            arrivals, clicks = self.state[key]
            value = orjson.dumps([sorted(arrivals), sorted(clicks)])
            emits.changelog.append((key, value))
            emits.decisions.append((key, value))
        return emits

    opened = None  # nothing to count

    def acknowledged(self, progress_time: int) -> None:
        """Delete nothing."""

    def release(self) -> None:
        self.state.clear()


class ToyProcessors(StreamProcessors):
    def make_task(self, partition: int) -> Joins:
        return Joins()

    def handle_together(self, work: Sequence[tuple[Any, Sequence[Record]]]) -> list[Emits]:
        return [task.handle(records) for task, records in work]


async def write_status(worker: Worker, path: Path) -> None:
    """Write the state of the worker to a file, for the test to read."""
    while True:
        status = {
            "generation": worker.pipelines.generation,
            "open": worker.serves,
            "partitions": sorted(worker.pipelines.by_partition),
            "restored": Joins.restored,
        }
        partial = path.with_suffix(".new")
        partial.write_bytes(orjson.dumps(status))
        partial.replace(path)
        await asyncio.sleep(0.05)


def die_at(step: int) -> None:
    """Kill this process at a step on the way to the broker: before or after a write, an acknowledgement, a commit."""
    count = 0

    def counted(call: Any) -> Any:
        def wrapped(*arguments: Any, **named: Any) -> Any:
            nonlocal count
            count += 1
            if count >= step:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **named)

        return wrapped

    def counted_after(call: Any) -> Any:
        async def wrapped(*arguments: Any, **named: Any) -> Any:
            result = await call(*arguments, **named)
            counted(lambda: None)()
            return result

        return wrapped

    TopicWriter.write = counted(TopicWriter.write)  # type: ignore[method-assign]
    PartitionPipeline._on_batch = counted(PartitionPipeline._on_batch)  # type: ignore[method-assign]
    Client._commit = counted_after(Client._commit)  # type: ignore[method-assign]


def main(settings: dict[str, Any]) -> int:
    logging.basicConfig(
        level=settings.pop("log", "WARNING"), format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr
    )
    servers, topics = ",".join(settings.pop("servers")), Topics(settings.pop("prefix"))
    connection = Connection(servers=tuple(servers.split(",")))
    status = Path(settings.pop("status"))
    if "die_at" in settings:
        die_at(settings.pop("die_at"))
    pipelines = PipelineSettings(
        connection=connection,
        topics=topics,
        learner=NO_LEARNER,
        versions=command("worker.cli.versions_process", "--broker", servers, "--prefix", topics.prefix),
        progress_interval=settings.pop("progress_interval"),
    )
    metrics = Metrics()
    first = Parameters.first(LearningSettings(dim=1), ())
    parameters = PublishedParameters(first, [first], metrics)  # no worker serves before a version is published
    worker = Worker(
        pipelines,
        ToyProcessors(parameters, topics, metrics, limits=Limits()),
        FaustTransport(FaustOptions(connection=connection, topics=topics, **settings)),
        partitions=asyncio.run(input_partitions(connection, topics)),
    )
    return worker.run(lambda: write_status(worker, status))


if __name__ == "__main__":
    code = main(json.loads(sys.argv[1]))
    sys.stderr.flush()
    os._exit(code)
