"""Topics of their own on a broker, and toy workers on them: tests without asyncio."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import orjson
import pytest
from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic, RecordsToDelete
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

from worker.child import command, environment
from worker.cli.main import main
from worker.kafka.clients import admin_client, partition_counts, standalone_consumer
from worker.kafka.connection import Connection
from worker.kafka.topics import TopicLayout
from worker.stream.topology import ONLY_PARTITION, Topics

ROOT = Path(__file__).parents[2]
_T = TypeVar("_T")


def eventually(condition: Callable[[], _T], *, within: float = 60.0, what: str = "") -> _T:
    """Return the first true value of the condition; fail if there is none in time."""
    deadline = time.monotonic() + within
    pause = threading.Event()
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {within:g} s: {what or condition}"
        pause.wait(0.05)


class TopicSet:
    """Topics under a prefix of their own."""

    def __init__(self, address: str, prefix: str, folder: Path) -> None:
        self.address, self.folder = address, folder
        self.connection = Connection(servers=(address,))
        self.names = Topics(prefix)
        #: The flags of commands on these topics.
        self.flags = ["--broker", address, "--prefix", prefix]

    def administer(self, call: Callable[[AIOKafkaAdminClient], Awaitable[_T]]) -> _T:
        async def run() -> _T:
            async with admin_client(self.connection) as admin:
                return await call(admin)

        return asyncio.run(run())

    def ends(self, *topics: str) -> dict[TopicPartition, int]:
        async def fetch() -> dict[TopicPartition, int]:
            counts = await partition_counts(self.connection, *topics)
            async with standalone_consumer(self.connection) as consumer:
                return dict(
                    await consumer.end_offsets([TopicPartition(t, p) for t in topics for p in range(counts[t])])
                )

        return asyncio.run(fetch())

    def read(self, topic: str) -> list[Any]:
        """Return all records of a topic, in the order of each partition."""
        ends = self.ends(topic)

        async def fetch() -> list[Any]:
            async with standalone_consumer(self.connection, fetch_max_wait_ms=50) as consumer:
                consumer.assign(list(ends))
                await consumer.seek_to_beginning(*ends)
                records: list[Any] = []
                while any([await consumer.position(tp) < end for tp, end in ends.items()]):
                    for some in (await consumer.getmany(timeout_ms=200)).values():
                        records += some
                return records

        return asyncio.run(fetch())

    def send_raw(
        self,
        records: Iterable[tuple[str, bytes | None, bytes | None]],
        transaction: str | None = None,
        place: Callable[[bytes, int], int] | None = None,
        compression: str = "gzip",
    ) -> list[int]:
        """Send records as they are, to the partitions of a partitioner of its own; return their partitions."""
        # Compressed, so that a record may be larger than the largest batch that a broker takes.
        options: dict[str, Any] = {"linger_ms": 2, "compression_type": compression, "max_request_size": 1 << 30}
        if place is not None:
            options["partitioner"] = lambda key, partitions, _: partitions[place(key, len(partitions))]

        async def produce() -> list[int]:
            async with AIOKafkaProducer(
                bootstrap_servers=self.address, transactional_id=transaction, **options
            ) as producer:
                if transaction:
                    await producer.begin_transaction()
                futures = [await producer.send(topic, value, key=key) for topic, key, value in records]
                if transaction:
                    await producer.commit_transaction()
                return [(await future).partition for future in futures]

        return asyncio.run(produce())

    def configure(self, topic: str, **settings: str) -> None:
        configs = {name.replace("_", "."): value for name, value in settings.items()}
        resource = ConfigResource(ConfigResourceType.TOPIC, topic, configs=configs)
        self.administer(lambda admin: admin.alter_configs([resource]))

    def trim(self, topic: str, before: int) -> None:
        """Delete the records before an offset from a topic with one partition."""
        offsets = {TopicPartition(topic, ONLY_PARTITION): RecordsToDelete(before_offset=before)}
        self.administer(lambda admin: admin.delete_records(offsets))


class CommandLine:
    """The commands, on the topics of a set."""

    def __init__(self, topics: TopicSet, capsys: pytest.CaptureFixture[str]) -> None:
        self._flags, self._capsys = topics.flags, capsys

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        """Return the exit code, the output and the errors of a command."""
        code = main([*arguments, *self._flags])
        captured = self._capsys.readouterr()
        return code, captured.out, captured.err

    def json(self, *arguments: str, code: int = 0) -> dict[str, Any]:
        found, out, err = self(*arguments, "--json", "-")
        assert found == code, err
        return dict(json.loads(out))


class WorkerProcess:
    """A worker and its learner process, in a process group: both can be stopped or killed at one moment."""

    def __init__(self, log: Path, *module: str, **variables: str) -> None:
        self.log, self.paused = log, False
        # In the folder where it runs there is another package of this name, as there may be in a user's.
        (log.parent / "worker.py").write_text("raise SystemExit('the wrong package')", encoding="utf-8")
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                command(*module),
                cwd=log.parent,
                env={**environment(), **variables},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def tail(self) -> str:
        return "\n".join(self.log.read_text(encoding="utf-8").splitlines()[-40:])

    def pause(self) -> None:
        os.killpg(self.process.pid, signal.SIGSTOP)
        self.paused = True

    def resume(self) -> None:
        os.killpg(self.process.pid, signal.SIGCONT)
        self.paused = False

    def kill(self, *, alone: bool = False) -> None:
        """Kill it with its learner process, or alone: then that has to end by itself."""
        if alone:
            self.process.kill()
        else:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class ToyWorker(WorkerProcess):
    """A worker with the toy processor."""

    def __init__(self, world: World, number: int, **options: Any) -> None:
        self.status_file = world.folder / f"worker-{number}.json"
        settings = {
            "servers": [world.address],
            "prefix": world.names.prefix,
            "group": world.names.prefix,
            "status": str(self.status_file),
            "session_timeout": 3.0,
            "progress_interval": 0.2,
            "log": "INFO",
            **options,
        }
        super().__init__(world.folder / f"worker-{number}.log", "tests.kafka.toy", json.dumps(settings))

    def status(self) -> dict[str, Any]:
        try:
            return dict(orjson.loads(self.status_file.read_bytes()))
        except FileNotFoundError:
            return {"open": False, "partitions": [], "generation": -1, "restored": 0}

    def is_open(self, partitions: int | None = None) -> bool:
        """Whether it serves, and, if given, so many partitions."""
        assert self.running, f"the worker has ended:\n{self.tail()}"
        status = self.status()
        return bool(status["open"]) and (partitions is None or len(status["partitions"]) == partitions)

    def terminate(self) -> int:
        self.process.terminate()
        return self.ended()

    def ended(self) -> int:
        return self.process.wait(60)


class World(TopicSet):
    """Topics, the toy workers on them, and the records that were sent."""

    def __init__(self, address: str, prefix: str, folder: Path, partitions: int = 4) -> None:
        super().__init__(address, prefix, folder)
        self.partitions = partitions
        self.workers: list[ToyWorker] = []
        #: Per key, the numbers of its arrivals and of its clicks.
        self.sent: dict[bytes, tuple[set[int], set[int]]] = defaultdict(lambda: (set(), set()))
        #: When the broker had acknowledged each (topic, number), and the partition it is in.
        self.acknowledged: dict[tuple[str, int], tuple[int, int]] = {}
        # Without policies: a compacted topic cannot be trimmed.
        wanted = TopicLayout().topics(self.names, partitions)
        made = [NewTopic(topic.name, topic.partitions, 1) for topic in wanted]
        self.administer(lambda admin: admin.create_topics(made))

    # ── topics ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def committed(self) -> dict[TopicPartition, int]:
        offsets: Any = self.administer(lambda admin: admin.list_consumer_group_offsets(self.names.prefix))
        return {tp: value.offset for tp, value in offsets.items() if tp.topic in self.names.inputs}

    # ── traffic ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def send(self, arrivals: Iterable[tuple[int, int]] = (), clicks: Iterable[tuple[int, int]] = ()) -> None:
        """Send (key, number) to the inputs and wait until the broker has them."""
        names = self.names
        events = [(names.arrivals, key, number) for key, number in arrivals]
        events += [(names.clicks, key, number) for key, number in clicks]
        pairs = [(topic, b"key-%d" % key, orjson.dumps({"n": number})) for topic, key, number in events]
        placed = self.send_raw(pairs)
        now = time.time_ns() // 1_000_000
        for (topic, key, number), partition in zip(events, placed, strict=True):
            self.sent[b"key-%d" % key][topic == names.clicks].add(number)
            self.acknowledged[topic, number] = (now, partition)

    def rounds(self, first: int, count: int, keys: int = 50, base: int = 0) -> None:
        """Send `count` arrivals and as many clicks, numbered from `first`, for `keys` keys from `base` on."""
        numbers = range(first, first + count)
        self.send([(base + n % keys, n) for n in numbers], [(base + n % keys, n) for n in numbers])

    # ── workers ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def start(self, **options: Any) -> ToyWorker:
        worker = ToyWorker(self, len(self.workers) + 1, **options)
        self.workers.append(worker)
        return worker

    def serving(self, **options: Any) -> ToyWorker:
        """Start a worker and wait until it serves all partitions."""
        worker = self.start(**options)
        eventually(lambda: worker.is_open(self.partitions), what="the worker serves all partitions")
        return worker

    def close(self) -> None:
        for worker in self.workers:
            if worker.running:
                worker.resume()
                worker.kill()

    # ── what must hold ───────────────────────────────────────────────────────────────────────────────────────────────

    def caught_up(self) -> bool:
        """Whether everything sent is processed, acknowledged and committed."""
        committed = self.committed()
        return all(committed.get(tp, 0) >= end for tp, end in self.ends(*self.names.inputs).items())

    def facts(self) -> list[tuple[bytes, str, int]]:
        """Return the journal without its progress: key, topic, number."""
        journal = [(record.key, orjson.loads(record.value)) for record in self.read(self.names.journal)]
        return [(key, body["kind"], body["n"]) for key, body in journal if body["kind"] != "progress"]

    def expected_facts(self) -> set[tuple[bytes, str, int]]:
        names = self.names
        return {
            (key, topic, number)
            for key, parts in self.sent.items()
            for topic, numbers in ((names.arrivals, parts[0]), (names.clicks, parts[1]))
            for number in numbers
        }

    def last(self, topic: str) -> dict[bytes, tuple[set[int], set[int]]]:
        """Return the last value of every key of a topic."""
        values = {record.key: orjson.loads(record.value) for record in self.read(topic)}
        return {key: (set(arrivals), set(clicks)) for key, (arrivals, clicks) in values.items()}

    def joined(self, topic: str) -> dict[bytes, tuple[set[int], set[int]]]:
        """Return the join of all values of every key of a topic."""
        joined: dict[bytes, tuple[set[int], set[int]]] = defaultdict(lambda: (set(), set()))
        for record in self.read(topic):
            arrivals, clicks = orjson.loads(record.value)
            joined[record.key][0].update(arrivals)
            joined[record.key][1].update(clicks)
        return joined

    def progress_is_true(self) -> int:
        """Check every progress record against what had been sent by its time; return how many there are."""
        seen: set[tuple[str, int]] = set()
        count = 0
        for record in self.read(self.names.journal):
            body = orjson.loads(record.value)
            if body["kind"] != "progress":
                seen.add((body["kind"], body["n"]))
                continue
            count += 1
            owed = {
                event
                for event, (time_, partition) in self.acknowledged.items()
                if partition == body["partition"] and time_ <= body["time"]
            }
            assert owed <= seen, f"progress {body} at {record.offset} before {sorted(owed - seen)[:3]}"
        return count
