"""Topics of their own on a broker, and toy workers on them: tests without asyncio."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import closing
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import orjson
import pytest
from confluent_kafka import ConsumerGroupTopicPartitions, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, NewTopic, ResourceType

from worker.child import command, environment
from worker.cli.main import main
from worker.kafka.clients import END, admin_client, offsets_of, partition_counts, topic_reader
from worker.kafka.connection import Connection
from worker.kafka.topics import TopicLayout, wait_for_topics
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


class ReadRecord(NamedTuple):
    """A record of a topic."""

    topic: str
    partition: int
    offset: int
    timestamp: int
    key: Any
    value: Any
    headers: tuple[tuple[str, Any], ...]


class TopicSet:
    """Topics under a prefix of their own."""

    def __init__(self, address: str, prefix: str, folder: Path) -> None:
        self.address, self.folder = address, folder
        self.connection = Connection(servers=(address,))
        self.names = Topics(prefix)
        #: The flags of commands on these topics.
        self.flags = ["--broker", address, "--prefix", prefix]

    @cached_property
    def admin(self) -> AdminClient:
        # Kept: futures of a client that is garbage are never done.
        return admin_client(self.connection)

    def ends(self, *topics: str) -> dict[tuple[str, int], int]:
        counts = partition_counts(self.connection, *topics)
        return offsets_of(self.admin, [TopicPartition(t, p) for t in topics for p in range(counts[t])], END)

    def read(self, topic: str) -> list[ReadRecord]:
        """Return all records of a topic, in the order of each partition."""
        ends, records = self.ends(topic), list[ReadRecord]()
        with topic_reader(self.connection, fetch_wait_max_ms=50) as reader:
            reader.read_from(dict.fromkeys(ends, 0))
            while any(reader.positions[place] < end for place, end in ends.items()):
                records += [
                    ReadRecord(
                        *(one.topic(), one.partition(), one.offset(), one.timestamp()[1], one.key(), one.value()),
                        tuple(one.headers() or ()),
                    )
                    for one in reader.poll(0.2)
                ]
        return records

    def send_raw(
        self,
        records: Iterable[tuple[str, bytes | None, bytes | None]],
        transaction: str | None = None,
        place: Callable[[bytes, int], int] | None = None,
        compression: str = "gzip",
    ) -> list[int]:
        """Send records as they are, to the partitions of a partitioner of its own; return their partitions."""
        sizes = {"message.max.bytes": 1_000_000_000, "queue.buffering.max.kbytes": 2_097_151, "batch.size": 1_000_000}
        settings = {"bootstrap.servers": self.address, "linger.ms": 2, "compression.type": compression, **sizes}
        if transaction:
            settings["transactional.id"] = transaction
        partitions: dict[int, int] = {}
        errors: list[KafkaError] = []
        with closing(Producer({**settings, "partitioner": "murmur2_random"})) as producer:
            if transaction:
                producer.init_transactions()
                producer.begin_transaction()
            for number, (topic, key, value) in enumerate(records):

                def delivered(error: KafkaError | None, message: Any, number: int = number) -> None:
                    if error is not None:
                        errors.append(error)
                    partitions[number] = message.partition()

                count = len(producer.list_topics(topic).topics[topic].partitions) if place else 0
                where = place(key or b"", count) if place else -1
                producer.produce(topic, value, key, where, on_delivery=delivered)
            producer.flush()
            if transaction:
                producer.commit_transaction()
        if errors:
            raise KafkaException(errors[0])
        return [partitions[number] for number in sorted(partitions)]

    def configure(self, topic: str, **settings: str) -> None:
        entries = [
            ConfigEntry(name.replace("_", "."), value, incremental_operation=AlterConfigOpType.SET)
            for name, value in settings.items()
        ]
        resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=entries)
        for future in self.admin.incremental_alter_configs([resource]).values():
            future.result()

    def trim(self, topic: str, before: int) -> None:
        """Delete the records before an offset from a topic with one partition."""
        for future in self.admin.delete_records([TopicPartition(topic, ONLY_PARTITION, before)]).values():
            future.result()


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
        admin = self.admin
        for future in admin.create_topics([NewTopic(topic.name, topic.partitions, 1) for topic in wanted]).values():
            future.result()
        wait_for_topics(admin, [topic.name for topic in wanted])

    # ── topics ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def committed(self) -> dict[tuple[str, int], int]:
        group = ConsumerGroupTopicPartitions(self.names.prefix)
        (future,) = self.admin.list_consumer_group_offsets([group]).values()
        return {(tp.topic, tp.partition): tp.offset for tp in future.result().topic_partitions}

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
