"""A worker with a small deterministic processor, to see what the transport does to it.

Per key: how many arrivals and which clicks were seen, as sets of numbers (joined, so that a repeat changes nothing).
Values are ``<key>:<number>``. The journal gets every record, the decisions the state, the changelog too.
Run as a process: ``python toy.py '{"servers": […], "prefix": …}'``.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import orjson
from mode import Service

from worker.kafka import learner
from worker.kafka.connection import Connection
from worker.kafka.faust import driver
from worker.kafka.faust.app import Options, WorkerApp, build, partition_count, run
from worker.kafka.pipeline import Lane
from worker.kafka.transport import DeadLetter, Emits, Lessons, Ports, Publication, Record
from worker.kafka.writer import TopicWriter
from worker.stream.topology import Topics


class Joins:
    """The task of a partition: state per key is the sorted numbers of its arrivals and of its clicks."""

    #: How many values tasks of this process have taken from the table.
    restored = 0

    def __init__(self, partition: int, partitions: int) -> None:
        self.partition = partition
        self.state: dict[bytes, tuple[set[int], set[int]]] = {}
        self.progress = 0

    def restore(self, items: Iterable[tuple[bytes, bytes]]) -> None:
        for key, value in items:
            arrivals, clicks = orjson.loads(value)
            self.state[key] = (set(arrivals), set(clicks))
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
                raise ZeroDivisionError("as asked")
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

    def acknowledged(self, progress_time: int) -> None:
        self.progress = progress_time

    def release(self) -> None:
        self.state.clear()


class Newest:
    """Keeps the newest version, and a count."""

    def __init__(self) -> None:
        self.version = -1
        self.resume = 0
        self.seen = 0

    def handle(self, records: Sequence[Record]) -> None:
        for record in records:
            self.seen += 1
            body = orjson.loads(record.value or b"{}")
            if body["version"] > self.version:
                self.version, self.resume = body["version"], body["resume_offset"]

    def wants(self, publication: Publication) -> bool:
        return publication.version > self.version


class Sums:
    """A learner: a version for every 100 journal facts; the hash chain stands for the fold."""

    watermark = 0

    def __init__(self, sink: Newest) -> None:
        self.version = sink.version
        self.resume_offset = sink.resume
        self._facts = 0

    def check_start(self, first: int, end: int) -> None:
        """Leave it to the transport."""

    def begin(self) -> Lessons:
        return self._version(0, 0) if self.version < 0 else Lessons()

    def handle(self, records: Sequence[Record]) -> Lessons:
        lessons = Lessons()
        for record in records:
            if b'"progress"' in (record.value or b""):
                continue
            self._facts += 1
            if self._facts % 100 == 0:
                more = self._version(self.version + 1, record.offset + 1)
                lessons.parameters += more.parameters
                lessons.episodes += more.episodes
        return lessons

    def _version(self, version: int, resume: int) -> Lessons:
        self.version = version
        value = orjson.dumps({"version": version, "resume_offset": resume})
        key = str(version % 8).encode()
        return Lessons(episodes=[(str(version).encode(), value)], parameters=[Publication(version, key, value)])


def progress(partition: int, partitions: int, time: int) -> tuple[bytes | None, bytes]:
    body = {"kind": "progress", "partition": partition, "partitions": partitions, "time": time}
    return None, orjson.dumps(body)


class Status(Service):
    """Says in a file how the worker is, for the test to look at."""

    def __init__(self, app: WorkerApp, sink: Newest, path: Path) -> None:
        super().__init__()
        self._app = app
        self._sink = sink
        self._path = path

    @Service.task
    async def _write(self) -> None:
        while not self.should_stop:
            app = self._app
            status = {
                "generation": app.serving.generation,
                "open": app.may_read,
                "partitions": sorted(app.serving.lanes),
                "learns": app.seat.taken,
                "learner_failure": app.seat.failure,
                "version": self._sink.version,
                "restored": Joins.restored,
            }
            partial = self._path.with_suffix(".new")
            partial.write_bytes(orjson.dumps(status))
            partial.replace(self._path)
            await self.sleep(0.05)


def die_at(step: int) -> None:
    """Kill this process at a step of the way to the broker: before or after a write, an acknowledgement, a commit."""
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

    TopicWriter.write_with_headers = counted(TopicWriter.write_with_headers)  # type: ignore[method-assign]
    Lane._when_durable = counted(Lane._when_durable)  # type: ignore[method-assign]
    driver.Client._commit = counted_after(driver.Client._commit)  # type: ignore[method-assign]


def main(settings: dict[str, Any]) -> int:
    as_learner = (sys.executable, "-m", "tests.kafka.toy", json.dumps({**settings, "learns": True}))
    logging.basicConfig(
        level=settings.pop("log", "WARNING"), format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr
    )
    connection = Connection(servers=tuple(settings.pop("servers")))
    names = Topics(settings.pop("prefix"))
    status = settings.pop("status")
    if "die_at" in settings:
        die_at(settings.pop("die_at"))
    sink = Newest()
    if settings.pop("learns", False):
        return learner.run(connection, names, sink, lambda: Sums(sink))
    ports = Ports(
        serve=Joins,
        step=lambda work: [task.handle(records) for task, records in work],
        parameters=sink,
        heard=lambda report: None,
        progress=progress,
        clock=lambda: time.time_ns() // 1_000_000,
    )
    partitions = asyncio.run(partition_count(connection, names))
    options = Options(connection=connection, names=names, learner=as_learner, **settings)
    app = build(options, ports, partitions=partitions)
    app.companions = (*app.companions, Status(app, sink, Path(status)))
    return run(app)


if __name__ == "__main__":
    code = main(json.loads(sys.argv[1]))
    sys.stderr.flush()
    os._exit(code)
