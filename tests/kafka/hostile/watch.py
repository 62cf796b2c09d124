"""The watchman: once a second, from outside, does it serve and does it learn? If not, does it say why?"""

from __future__ import annotations

import re
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.kafka.fleet import Running, page
from tests.kafka.hostile.driver import Driver
from tests.kafka.hostile.fleet import HostileFleet

#: Seconds without an answer, or without a version, after which somebody must be told.
LONGEST: Final = 30.0
#: The kinds of trouble that say why nothing is served or learned; a worker that is not ready says so, too.
WHY: Final[dict[str, frozenset[str]]] = {
    "serving": frozenset({"watermark-stalled"}),
    "learning": frozenset({"watermark-stalled", "learner-down", "late-versions", "clock"}),
}
#: An account that does not balance is a defect, whatever comes in.
_IMBALANCE: Final = re.compile(r"^adcascade_accounting_imbalance\{.*\} (?!-?0(?:\.0)?$).*$", re.MULTILINE)
_TROUBLE: Final = re.compile(r'^adcascade_trouble\{kind="([^"]+)"[^}]*\} 1(?:\.0)?$', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Report:
    """What one worker answers: whether it is ready, why not, and its troubles."""

    worker: str
    ready: bool
    text: str
    troubles: tuple[str, ...]
    imbalances: tuple[str, ...] = ()

    def says_why(self, what: str) -> bool:
        """Whether `/readyz` and the gauge of the alert give a reason."""
        return not self.ready or any(kind in self.text for kind in WHY[what].intersection(self.troubles))

    def __str__(self) -> str:
        return f"{self.worker}: {self.text.strip().splitlines()[0]!r}, troubles {', '.join(self.troubles) or 'none'}"


def ask(name: str, worker: Running) -> Report:
    """Ask a worker; one that does not answer is down for every monitoring system."""
    url = worker.url
    if not url:
        return Report(name, False, "it starts", ())
    status, text = page(url + "/readyz", timeout=3)
    metrics = page(url + "/metrics", timeout=3)[1]
    return Report(name, status == 200, text, tuple(_TROUBLE.findall(metrics)), tuple(_IMBALANCE.findall(metrics)))


class Watch:
    """Samples in a thread of its own."""

    def __init__(self, fleet: HostileFleet, driver: Driver) -> None:
        self._fleet, self._driver = fleet, driver
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._ready_since: dict[Running, float] = {}  # workers that were ready in every sample since
        self._version, self._version_since = -1, time.monotonic()
        #: Stalls that nobody announced; and all kinds of trouble that were seen.
        self.silent: list[str] = []
        self.troubles: set[str] = set()
        self.imbalances: list[str] = []
        self.longest = {"serving": 0.0, "learning": 0.0}
        self.most_memory = 0

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(1.0):
            self._sample()

    def _sample(self) -> None:
        now, fleet = time.monotonic(), self._fleet
        running = fleet.running
        if self._driver.version != self._version:
            self._version, self._version_since = self._driver.version, now
        reports = [ask(fleet.name(worker), worker) for worker in running]
        ready = [worker for worker, report in zip(running, reports, strict=True) if report.ready]
        fleet.ready_once.update(ready)
        self._ready_since = {worker: self._ready_since.get(worker, now) for worker in ready}
        self.troubles.update(kind for report in reports for kind in report.troubles)
        self.imbalances += [f"{report.worker}: {line}" for report in reports for line in report.imbalances]
        self.most_memory = max([self.most_memory, *(resident(worker.process.pid) for worker in running)])
        up = fleet.broker_up_since
        if not ready or up is None:
            return  # that says enough
        # Nobody can announce what began before its time: it counts from when a broker and a worker were ready.
        able = max(min(self._ready_since.values()), up)
        oldest = min(self._driver.waiting.values(), default=0) / 1000
        unanswered = time.time() - oldest if oldest else 0.0
        for what, seconds in (("serving", unanswered), ("learning", now - self._version_since)):
            self._judge(what, min(seconds, now - able), reports)

    def _judge(self, what: str, seconds: float, reports: list[Report]) -> None:
        self.longest[what] = max(self.longest[what], seconds)
        if seconds <= LONGEST:
            return
        said = "; ".join(map(str, reports))
        announced = any(report.says_why(what) for report in reports)
        if int(seconds) % 10 == 0 or not announced:
            self._fleet.timeline.note(f"no {what} for {seconds:.0f} s; {said}")
        if not announced:
            self.silent.append(f"no {what} for {seconds:.0f} s, and nothing said so: {said}")


def resident(pid: int) -> int:
    """Return the resident memory of a process in MiB."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return 0
    return pages * 4096 >> 20
