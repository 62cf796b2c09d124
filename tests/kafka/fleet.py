"""Real workers (`adcascade worker`) on topics of their own."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import orjson
from aiokafka import AIOKafkaProducer

from tests.embedded.traffic import ARMS, Sent, settings
from tests.kafka.world import ROOT, eventually, read_topic
from worker.kafka.clients import run_client
from worker.kafka.connection import Connection
from worker.kafka.control import KafkaControl
from worker.kafka.topics import TopicLayout, create
from worker.stream.parameters import LearningSettings
from worker.stream.topology import Topics

#: The settings of tests/embedded/traffic.py as flags.
TIMES = ("window", "session_timeout", "lateness")


def flags(learning: LearningSettings) -> list[str]:
    given = {"dim": learning.dim, "horizon": learning.horizon, "warmup": learning.warmup}
    given |= {name: f"{getattr(learning, name)}ms" for name in TIMES}
    return [text for name, value in given.items() for text in (f"--{name.replace('_', '-')}", str(value))]


class Running:
    """One `adcascade worker`."""

    def __init__(self, fleet: Fleet, number: int, arguments: Iterable[str], environment: dict[str, str]) -> None:
        self.paused = False
        self.log = fleet.folder / f"worker-{number}.log"
        command = [sys.executable, "-m", "worker", "worker", *fleet.arguments, *arguments]
        clock = {"ADCASCADE_TEST_CLOCK": str(fleet.clock)} if fleet.clock.exists() else {}
        with self.log.open("ab") as log:
            # A process group with its learner process, so that both can be stopped or killed at one moment.
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, **clock, **environment},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text(encoding="utf-8").splitlines() if line[:1] == "{"]

    @property
    def url(self) -> str:
        found = re.search(r'"url":"(http://[^"]+)"', self.log.read_text(encoding="utf-8"))
        return found[1] if found else ""

    def ask(self, path: str) -> tuple[int, str]:
        """Return status and text of a page; status 0 while there is no answer."""
        assert self.process.poll() is None, f"the worker has ended:\n{self.tail()}"
        if not self.url:
            return 0, ""
        try:
            with urlopen(self.url + path, timeout=10) as answer:
                return answer.status, answer.read().decode()
        except HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except (URLError, ConnectionError):
            return 0, ""

    def metric(self, series: str) -> float:
        found = re.search(rf"^{re.escape(series)} (\S+)$", self.ask("/metrics")[1], re.MULTILINE)
        return float(found[1]) if found else -1.0

    def knows(self, version: int) -> bool:
        return self.metric("adcascade_parameters_version") == version

    def pause(self) -> None:
        os.killpg(self.process.pid, signal.SIGSTOP)
        self.paused = True

    def resume(self) -> None:
        os.killpg(self.process.pid, signal.SIGCONT)
        self.paused = False

    @property
    def learner(self) -> int | None:
        """The id of its learner process."""
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
        return int(children[0]) if children else None

    @property
    def ready(self) -> bool:
        return self.ask("/readyz")[0] == 200

    def tail(self) -> str:
        return "\n".join(self.log.read_text(encoding="utf-8").splitlines()[-20:])

    def kill(self, *, alone: bool = False) -> None:
        """Kill it with its learner process, or alone: then that has to end by itself."""
        if alone:
            self.process.kill()
        else:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def terminate(self) -> tuple[int, float]:
        """Stop it as an orchestrator does; return the exit code and how long it took."""
        began = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30), time.monotonic() - began


class Fleet:
    """Topics, the workers on them, and their clock."""

    def __init__(self, address: str, prefix: str, folder: Path, *, partitions: int = 4) -> None:
        self.address, self.folder = address, folder
        self.names = Topics(prefix)
        self.connection = Connection(servers=(address,))
        self.clock = folder / "clock"
        self.workers: list[Running] = []
        arms = folder / "arms.json"
        arms.write_bytes(orjson.dumps({arm.arm: arm.reward for arm in ARMS}))
        self.arguments = ["--broker", address, "--prefix", prefix, "--group", prefix, "--catalog", str(arms)]
        self.arguments += ["--progress-interval", "100ms", "--member-timeout", "2s", *flags(settings())]
        run_client(self.connection, create(self.connection, self.names, TopicLayout(partitions=partitions)))

    def set_clock(self, now: int) -> None:
        """Set the clock of the workers; they must not read half of it."""
        partial = self.clock.with_suffix(".new")
        partial.write_text(str(now), encoding="ascii")
        partial.replace(self.clock)

    def start(self, *arguments: str, **environment: str) -> Running:
        worker = Running(self, len(self.workers) + 1, arguments, environment)
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

    def send_raw(self, records: Iterable[tuple[str, bytes | None, bytes | None]]) -> None:
        async def produce() -> None:
            # Compressed, so that a record may be larger than the largest batch that a broker takes.
            async with AIOKafkaProducer(
                bootstrap_servers=self.address, linger_ms=2, compression_type="gzip", max_request_size=64 << 20
            ) as producer:
                sent = [await producer.send(topic, value, key=key) for topic, key, value in records]
                await asyncio.gather(*sent)

        asyncio.run(produce())

    def read(self, topic: str) -> list[Any]:
        return asyncio.run(read_topic(self.connection, topic))

    def facts(self) -> set[bytes]:
        """Return the journal without its progress."""
        return {record.value for record in self.read(self.names.journal) if b'"kind":"progress"' not in record.value}

    def answered(self) -> set[str]:
        """Return the sessions that have a decision."""
        return {record.key.decode() for record in self.read(self.names.decisions)}

    @property
    def running(self) -> list[Running]:
        return [worker for worker in self.workers if worker.process.poll() is None and not worker.paused]

    def close(self) -> None:
        for worker in self.workers:
            if worker.process.poll() is None:
                worker.kill()
