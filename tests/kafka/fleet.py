"""Real workers (`adcascade worker`) on topics of their own."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import orjson

from tests.embedded.traffic import ARMS, Sent, settings
from tests.kafka.world import TopicSet, WorkerProcess, eventually
from worker.kafka.control import KafkaControl
from worker.kafka.topics import TopicLayout, create
from worker.stream.settings import LearningSettings

#: The settings of tests/embedded/traffic.py as flags.
TIMES = ("window", "session_timeout", "lateness")


def flags(learning: LearningSettings) -> list[str]:
    given = {"dim": learning.dim, "horizon": learning.horizon, "warmup": learning.warmup}
    given |= {name: f"{getattr(learning, name)}ms" for name in TIMES}
    texts = [text for name, value in given.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    return texts if learning.standardise else [*texts, "--no-standardise"]


class Running(WorkerProcess):
    """One `adcascade worker`."""

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text(encoding="utf-8").splitlines() if line[:1] == "{"]

    @property
    def url(self) -> str:
        found = re.search(r'"url":"(http://[^"]+)"', self.log.read_text(encoding="utf-8"))
        return found[1] if found else ""

    def ask(self, path: str) -> tuple[int, str]:
        """Return status and text of a page; status 0 while there is no answer."""
        assert self.running, f"the worker has ended:\n{self.tail()}"
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

    @property
    def balanced(self) -> bool:
        series = 'adcascade_accounting_imbalance{{identity="{}"}}'
        return all(self.metric(series.format(name)) == 0 for name in ("arrivals", "sessions", "feedback"))

    def has_version(self, version: int) -> bool:
        return self.metric("adcascade_parameters_version") == version

    @property
    def learner(self) -> int | None:
        """The id of its learner process."""
        return self._child(b"worker.cli.child")

    def _child(self, module: bytes) -> int | None:
        pid = self.process.pid
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split():
            with suppress(FileNotFoundError):
                if module in Path(f"/proc/{child}/cmdline").read_bytes():
                    return int(child)
        return None

    @property
    def ready(self) -> bool:
        return self.ask("/readyz")[0] == 200

    def terminate(self) -> int:
        """Stop it as an orchestrator does; return the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(120)


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
        create(self.connection, self.names, TopicLayout(partitions=partitions))

    def set_clock(self, now: int) -> None:
        """Set the clock of the workers; they must not read half of it."""
        partial = self.clock.with_suffix(".new")
        partial.write_text(str(now), encoding="ascii")
        partial.replace(self.clock)

    def start(self, *arguments: str, **environment: str) -> Running:
        clock = {"ADCASCADE_TEST_CLOCK": str(self.clock)} if self.clock.exists() else {}
        log = self.folder / f"worker-{len(self.workers) + 1}.log"
        worker = Running(log, "worker", "worker", *self.arguments, *arguments, **clock, **environment)
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

    def answered(self) -> set[str]:
        """Return the sessions that have a decision."""
        return {record.key.decode() for record in self.read(self.names.decisions)}

    @property
    def running(self) -> list[Running]:
        return [worker for worker in self.workers if worker.running and not worker.paused]

    def close(self) -> None:
        for worker in self.workers:
            if worker.running:
                worker.kill()
