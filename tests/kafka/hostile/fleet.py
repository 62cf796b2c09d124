"""The workers under attack: some that always run, some that come and go, each with a clock of its own."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path
from typing import Final

import orjson

from tests.kafka.conftest import OwnBroker, broker
from tests.kafka.fleet import Fleet, Running
from tests.kafka.hostile.driver import ADS, DIM
from tests.kafka.hostile.ledger import Timeline, now_ms

WINDOW: Final = 5_000
SESSION_TIMEOUT: Final = 4_000
LATENESS: Final = 3_000
HORIZON: Final = 3
#: Workers that are started again when they end.
KEPT: Final = 2
SECRET: Final = "a secret of the hostile suite"
MEMBER_TIMEOUT: Final = 5.0


class Clocks:
    """A clock per worker: this machine's, plus a step. A thread writes them to the files that the workers read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.steps: dict[str, int] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._tick, daemon=True)
        self._thread.start()

    def add(self, name: str) -> Path:
        """Return the file of a new clock."""
        self._write(name, 0)
        self.steps[name] = 0  # only now: from here on the thread writes it
        return self._folder / name

    def _write(self, name: str, step: int) -> None:
        partial = self._folder / f"{name}.new"
        partial.write_text(str(now_ms() + step), encoding="ascii")
        partial.replace(self._folder / name)

    def _tick(self) -> None:
        while not self._ended.wait(0.03):
            for name, step in list(self.steps.items()):
                self._write(name, step)

    def close(self) -> None:
        self._ended.set()
        self._thread.join()


class HostileFleet(Fleet):
    """Workers on a broker that may be killed."""

    def __init__(self, own: OwnBroker, folder: Path, timeline: Timeline) -> None:
        super().__init__(own.address, "hostile", folder)
        self.own, self.timeline = own, timeline
        self.broker_up_since: float | None = time.monotonic()
        (folder / "clocks").mkdir()
        self.clocks = Clocks(folder / "clocks")
        self.kept: list[Running] = []
        self.names_of: dict[Running, str] = {}
        #: Workers that were ready once, and those that were paused or had no broker: at its start, that ends a worker.
        self.ready_once: set[Running] = set()
        self.disturbed: set[Running] = set()
        #: Workers that ended although nobody ended them.
        self.deaths: list[str] = []
        prices = {ad: reward for ad, (reward, _) in ADS.items()}
        catalogue = self.catalogue("arms.json", prices)
        other = self.catalogue("other.json", {**prices, "ad-0": 0.9, "ad-x": 0.7})
        #: Flags of workers that are started with other settings by mistake, or in the middle of a change.
        self.other_settings = [["--catalog", other], ["--horizon", "2"], ["--window", "10s"], ["--beta", "1"]]
        self.other_settings.append(["--beta", "0.5", "--random-share", "0.1"])
        self.arguments = [*self.flags, "--group", "hostile", "--catalog", catalogue, "--dim", str(DIM)]
        self.arguments += ["--horizon", str(HORIZON), "--window", f"{WINDOW}ms", "--lateness", f"{LATENESS}ms"]
        self.arguments += ["--session-timeout", f"{SESSION_TIMEOUT}ms", "--warmup", "1"]
        self.arguments += ["--progress-interval", "200ms", "--member-timeout", f"{MEMBER_TIMEOUT:g}s"]

    def catalogue(self, name: str, ads: dict[str, float]) -> str:
        file = self.folder / name
        file.write_bytes(orjson.dumps(ads))
        return str(file)

    # ── workers ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def start(self, *arguments: str, **environment: str) -> Running:
        name = f"worker-{len(self.workers) + 1}"
        clock = {"ADCASCADE_TEST_CLOCK": str(self.clocks.add(name)), "ADCASCADE_TOKEN_SECRET": SECRET}
        log = self.folder / f"{name}.log"
        worker = Running(log, "worker", *self.arguments, *arguments, **clock, **environment)
        self.workers.append(worker)
        self.names_of[worker] = name
        if self.broker_up_since is None:
            self.disturbed.add(worker)
        self.timeline.note(f"{name} starts, {' '.join(arguments) or 'with the usual settings'}")
        return worker

    def name(self, worker: Running) -> str:
        return self.names_of[worker]

    def keep(self) -> None:
        """Start the workers that always run; call it again and again."""
        for worker in [one for one in self.kept if not one.running]:
            self.kept.remove(worker)
            self.inspect(worker)
        while len(self.kept) < KEPT:
            self.kept.append(self.start())

    def inspect(self, worker: Running) -> None:
        """Note how a worker ended. One that cannot begin ends with an error, and is started again."""
        code = worker.process.returncode
        if code in (0, -signal.SIGKILL):
            return
        text = f"{self.name(worker)} ended by itself with {code}: {' '.join(worker.tail().splitlines()[-1:])[:500]}"
        self.timeline.note(text)
        if worker in self.ready_once or worker not in self.disturbed:
            self.deaths.append(text)

    def set_step(self, worker: Running, step: int) -> None:
        self.clocks.steps[self.name(worker)] = step

    # ── the broker ───────────────────────────────────────────────────────────────────────────────────────────────────

    def stop_broker(self, *how: str) -> None:
        self.broker_up_since = None
        self.disturbed.update(one for one in self.workers if one.running)
        broker("stop", *how, *self.own.data)

    def start_broker(self) -> None:
        broker("start", "--port", self.address.rpartition(":")[2], *self.own.data)
        self.broker_up_since = time.monotonic()

    def close(self) -> None:
        self.clocks.close()
        super().close()
