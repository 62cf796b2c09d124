"""Wrong clocks, wrong timestamps and wrong units on the real broker, all at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import orjson
import pytest

from tests.embedded.traffic import ARMS, SECOND, settings
from tests.kafka.fleet import Fleet, flags
from tests.kafka.world import eventually
from worker.stream.encoding import encode_journal
from worker.stream.events import Opened
from worker.stream.learner import Learner

pytestmark = pytest.mark.slow

HOUR = 3600 * SECOND
QUICK = settings(window=SECOND, session_timeout=5 * SECOND, lateness=SECOND)
YEAR_2100 = 4_102_444_800_000


class Clock:
    """The clock of the workers: the true time and an error."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet, self.error = fleet, 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._tick)

    @property
    def true(self) -> int:
        return time.time_ns() // 1_000_000

    def _tick(self) -> None:
        while not self._stop.is_set():
            self._fleet.set_clock(self.true + self.error)
            self._stop.wait(0.02)

    @contextmanager
    def running(self) -> Iterator[None]:
        self._fleet.set_clock(self.true)
        self._thread.start()
        try:
            yield
        finally:
            self._stop.set()
            self._thread.join()


class Users:
    """Users who pass over the first ad and wait for the second."""

    def __init__(self, fleet: Fleet, clock: Clock) -> None:
        self._fleet, self._clock, self.count = fleet, clock, 0

    def come(self) -> None:
        """Let five users come, look at the first ad, and get the second."""
        names = [f"user-{self.count + index}" for index in range(5)]
        self.count += len(names)
        topics = self._fleet.names
        context = {"context": [0.1, 0.2, 0.3]}
        now = self._clock.true
        self._send(topics.arrivals, now, dict.fromkeys(names, context))
        first = self._decided(names, 1)
        passed = {name: {"position": 1, "arm": first[name]["arm"], "clicked": False} for name in names}
        self._send(topics.clicks, now + 1, passed)
        self._decided(names, 2)

    def _send(self, topic: str, now: int, records: dict[str, dict[str, object]]) -> None:
        at = {"occurred_at": now}
        self._fleet.send_raw(
            (topic, name.encode(), orjson.dumps({"session_id": name, **at, **record}))
            for name, record in records.items()
        )

    def _decided(self, names: list[str], position: int) -> dict[str, dict[str, object]]:
        def found() -> dict[str, dict[str, object]] | None:
            all_ = [orjson.loads(record.value) for record in self._fleet.read(self._fleet.names.decisions)]
            own = {one["session_id"]: one for one in all_ if one["position"] == position}
            return own if own.keys() >= set(names) else None

        result = eventually(found, what=f"decisions for position {position}")
        assert result is not None
        return result


def test_wrong_clocks_timestamps_and_units_stop_neither_second_decisions_nor_learning(fleet: Fleet) -> None:
    clock, names = Clock(fleet), fleet.names
    users = Users(fleet, clock)
    with clock.running():
        worker = fleet.serving(*flags(QUICK), "--max-behind", "1h")
        seconds = {"session_id": "s", "occurred_at": clock.true // 1000, "context": [0.1, 0.2, 0.3]}
        fleet.send_raw([(names.arrivals, b"s", orjson.dumps(seconds))])
        # As a worker of an older version has written it.
        slate = tuple(arm.arm for arm in ARMS[:2])
        opened = {"context": (0.1, 0.2, 0.3), "slate": slate, "modes": ("exploit",) * 2, "exclude": ()}
        far = Opened(session_id="far", arrived_at=YEAR_2100, parameters_version=0, **opened)  # type: ignore[arg-type]
        fleet.send_raw([(names.journal, b"far", encode_journal(far))])
        users.come()
        clock.error = HOUR
        eventually(lambda: "clock: " in worker.ask("/readyz")[1], what="the clock is reported")
        assert worker.ready
        users.come()
        clock.error = 0
        eventually(lambda: "clock: " not in worker.ask("/readyz")[1], what="it is right again")
        users.come()
        learned = eventually(
            lambda: [one for one in fleet.control.history() if one.observations == users.count],
            what="every observation is learned from",
        )
    journal = [(one.offset, one.value, one.timestamp) for one in fleet.read(names.journal)]
    again = Learner(QUICK, ARMS)
    again.handle(journal)
    assert learned[-1].sha256 == again.current.sha256
    assert learned[-1].resume_offset > 20, "the session of the year 2100 does not hold it back"
    assert worker.metric('adcascade_troubles_total{kind="far-future"}') == 1
    ahead = [
        orjson.loads(value)["time"] - timestamp for _, value, timestamp in journal if b'"kind":"progress"' in value
    ]
    assert max(ahead) < 60 * SECOND
    (letter,) = fleet.read(names.dead_letters)
    assert dict(letter.headers)["adcascade.reason"] == b"past"
    assert dict(letter.headers)["adcascade.error"].endswith(b"(looks like seconds)")
    assert worker.balanced
