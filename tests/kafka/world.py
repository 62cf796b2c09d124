"""Topics of their own on a broker, and processes of workers: tests without asyncio."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest
from confluent_kafka import KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

from worker.cli.main import main
from worker.kafka.clients import END, admin_client, offsets_of, partition_counts, topic_reader
from worker.kafka.connection import Connection
from worker.runtime.child import command, environment
from worker.stream.topology import ONLY_PARTITION, Topics

ROOT = Path(__file__).parents[2]
_T = TypeVar("_T")


def eventually(condition: Callable[[], _T], *, within: float = 300.0, what: str = "") -> _T:
    """Return the first true value of the condition; fail if it is stuck, on the slowest machine."""
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
