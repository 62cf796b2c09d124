"""Topics of their own on a broker, commands and real workers on them: tests without asyncio."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from functools import cached_property
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import HTTPError
from urllib.request import urlopen

import orjson
import pytest
from confluent_kafka import KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

from tests.embedded.traffic import ARMS, Sent, settings
from tests.programs import eventually
from worker.cli.main import main
from worker.kafka.clients import END, TopicReader, admin_client, offsets_of, partition_counts
from worker.kafka.connection import Connection
from worker.kafka.control import KafkaControl
from worker.kafka.topics import TopicLayout, check
from worker.runtime.process import command, environment
from worker.stream.settings import LearningSettings
from worker.stream.topology import ONLY_PARTITION, Topics

ROOT = Path(__file__).parents[2]


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
        return offsets_of(self.admin, [(t, p) for t in topics for p in range(counts[t])], END)

    def read(self, topic: str) -> list[ReadRecord]:
        """Return all records of a topic, in the order of each partition."""
        ends, records = self.ends(topic), list[ReadRecord]()
        with TopicReader(self.connection, fetch_wait_max_ms=50) as reader:
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


class Running:
    """An adcascade process with a web server, and its children: all can be stopped or killed at one moment."""

    def __init__(self, log: Path, *words: str, **variables: str) -> None:
        self.log, self.paused = log, False
        # In the folder where it runs there is another package of this name, as there may be in a user's.
        (log.parent / "worker.py").write_text("raise SystemExit('the wrong package')", encoding="utf-8")
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                command("worker", *words),
                cwd=log.parent,
                env={**environment(), **variables},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    @property
    def text(self) -> str:
        """All that it has written."""
        return self.log.read_text(encoding="utf-8")

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.text.splitlines() if line[:1] == "{"]

    def tail(self) -> str:
        return "\n".join(self.text.splitlines()[-40:])

    @property
    def url(self) -> str:
        found = re.search(r'"url":"(http://[^"]+)"', self.text)
        return found[1] if found else ""

    def ask(self, path: str) -> tuple[int, str]:
        """Return status and text of a page; status 0 while there is no answer."""
        assert self.running, f"the process has ended:\n{self.tail()}"
        return page(self.url + path) if self.url else (0, "")

    def metric(self, series: str) -> float:
        found = re.search(rf"^{re.escape(series)} (\S+)$", self.ask("/metrics")[1], re.MULTILINE)
        return float(found[1]) if found else -1.0

    @property
    def balanced(self) -> bool:
        series = 'adcascade_accounting_imbalance{{identity="{}"}}'
        return all(self.metric(series.format(name)) == 0 for name in ("arrivals", "sessions", "feedback"))

    def has_version(self, version: int) -> bool:
        return self.metric("adcascade_parameters_version") == version

    @property
    def learner(self) -> int | None:
        """The id of its learner process."""
        pid = self.process.pid
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split():
            with suppress(FileNotFoundError):
                if b"worker-learner" in Path(f"/proc/{child}/cmdline").read_bytes():
                    return int(child)
        return None

    @property
    def ready(self) -> bool:
        return self.ask("/readyz")[0] == 200

    def pause(self) -> None:
        os.killpg(self.process.pid, signal.SIGSTOP)
        self.paused = True

    def resume(self) -> None:
        os.killpg(self.process.pid, signal.SIGCONT)
        self.paused = False

    def kill(self, *, alone: bool = False) -> None:
        """Kill it with its children, or alone: then those have to end by themselves."""
        if alone:
            self.process.kill()
        else:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        if self.running:
            self.kill()

    def terminate(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Stop it as an orchestrator does; return the exit code."""
        self.process.send_signal(number)
        return self.process.wait(300)


def page(url: str, timeout: float = 60.0) -> tuple[int, str]:
    """Return status and text of a page; status 0 and the reason if there is no answer."""
    try:
        with urlopen(url, timeout=timeout) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        with error:
            return error.code, error.read().decode()
    except (OSError, HTTPException) as error:
        return 0, f"no answer: {error}"


def flags(learning: LearningSettings) -> list[str]:
    """Return the settings of tests/embedded/traffic.py as flags of a worker."""
    given = {"dim": learning.dim, "horizon": learning.horizon, "warmup": learning.warmup}
    given |= {name: f"{getattr(learning, name)}ms" for name in ("window", "session_timeout", "lateness")}
    texts = [text for name, value in given.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    return texts if learning.standardise else [*texts, "--no-standardise"]


class Fleet(TopicSet):
    """Topics, the workers on them, and their clock."""

    def __init__(self, address: str, prefix: str, folder: Path, *, partitions: int = 4) -> None:
        super().__init__(address, prefix, folder)
        self.clock = folder / "clock"
        self.workers: list[Running] = []
        arms = folder / "arms.json"
        arms.write_bytes(orjson.dumps({arm.arm: arm.reward for arm in ARMS}))
        self.arguments = [*self.flags, "--group", prefix, "--catalog", str(arms)]
        self.arguments += ["--progress-interval", "100ms", "--member-timeout", "2s", *flags(settings())]
        self.arguments += ["--max-behind", "36500d"]  # the events of these tests are years old
        check(self.connection, self.names, TopicLayout(partitions=partitions), create=True)

    def set_clock(self, now: int) -> None:
        """Set the clock of the workers; they must not read half of it."""
        partial = self.clock.with_suffix(".new")
        partial.write_text(str(now), encoding="ascii")
        partial.replace(self.clock)

    def start(self, *arguments: str, **environment: str) -> Running:
        clock = {"ADCASCADE_TEST_CLOCK": str(self.clock)} if self.clock.exists() else {}
        log = self.folder / f"worker-{len(self.workers) + 1}.log"
        worker = Running(log, "worker", *self.arguments, *arguments, **clock, **environment)
        self.workers.append(worker)
        return worker

    def serving(self, *arguments: str, **environment: str) -> Running:
        worker = self.start(*arguments, **environment)
        eventually(lambda: worker.ready, what="the worker is ready")
        return worker

    @property
    def control(self) -> KafkaControl:
        return KafkaControl(self.connection, self.names)

    def send(self, records: Iterable[Sent]) -> None:
        """Send to the inputs, in the order given, and wait until the broker has everything."""
        self.send_raw((getattr(self.names, one.topic), one.session.encode(), one.value) for one in records)

    def facts(self) -> set[bytes]:
        """Return the journal without its progress."""
        return {record.value for record in self.read(self.names.journal) if b'"kind":"progress"' not in record.value}

    def displays(self, session_id: str) -> set[tuple[int, str, bool]]:
        """Return position, arm and reaction of the feedback of a session that is in the journal."""
        facts = [orjson.loads(fact) for fact in self.facts()]
        mine = [one for one in facts if one["kind"] == "feedback" and one["session_id"] == session_id]
        return {(one["position"], one["arm"], one["clicked"]) for one in mine}

    def dead_keys(self) -> set[bytes | None]:
        """Return the keys of the dead letters."""
        return {record.key for record in self.read(self.names.dead_letters)}

    def answered(self) -> set[str]:
        """Return the sessions that have a decision."""
        return {record.key.decode() for record in self.read(self.names.decisions)}

    @property
    def running(self) -> list[Running]:
        return [worker for worker in self.workers if worker.running and not worker.paused]

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
