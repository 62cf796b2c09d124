"""Record a small run of the embedded runner, with every topic, every kind of event, and irregular records.

``python -m tests.golden.recording`` writes the golden log again. Do that only if the format of a record changes on
purpose. Otherwise a golden log that does not replay is a defect.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from tests.stream.scenes import ADDITIVE
from worker.embedded.runner import Embedded
from worker.kernels import fingerprint
from worker.logs.format import LogWriter
from worker.stream.events import ArmChange, Arrival, Command, Feedback, Order, encode_event
from worker.stream.settings import Arm, LearningSettings
from worker.stream.topology import Topics

GOLDEN = Path(__file__).with_name("log.jsonl.gz")
FACTS = Path(__file__).with_name("log.json")

START = 1_700_000_000_000
ARMS = tuple(Arm(arm=f"ad-{k}", reward=1.0 + k) for k in range(5))
TRUTH = np.array([-0.5, -1.0, -1.8, -2.2, -3.0, -1.0])
SETTINGS: dict[str, Any] = {
    "dim": 3,
    "horizon": 4,
    "warmup": 1,
    "window": 10_000,
    "session_timeout": 6_000,
    "lateness": 2_000,
    "random_share": 0.1,
    **ADDITIVE,
}
#: A new arm, a retired arm, a pause of learning, and two rollbacks: (milliseconds, order).
ORDERS: Sequence[tuple[int, Order]] = (
    (25_000, ArmChange(arm="ad-5", reward=2.5, active=True)),
    (41_000, ArmChange(arm="ad-0", reward=1.0, active=False)),
    (47_500, Command(action="freeze")),
    (58_000, Command(action="unfreeze")),
    (66_000, Command(action="rollback", version=4)),
    (66_000, Command(action="rollback", version=999)),
)


class Run:
    """Send simulated users through an embedded runner."""

    def __init__(self, *, sessions: int, rate: int, seed: int, oddities: bool, **embedded: Any) -> None:
        self.generator = np.random.default_rng(seed)
        settings = LearningSettings(**{**SETTINGS, **embedded.pop("settings", {})})
        self.topics: Topics = embedded.setdefault("topics", Topics())
        self.runner = Embedded(settings, ARMS, **{"partitions": 3, **embedded})
        self.agenda: list[tuple[int, int, str, bytes, bytes]] = []
        self.contexts: dict[str, tuple[float, ...]] = {}
        self.answered: set[tuple[str, int]] = set()
        self.last = START
        for number in range(sessions):
            self._plan(number, START + number * 1000 // rate + int(self.generator.integers(200)), oddities)

    def _plan(self, number: int, at: int, oddities: bool) -> None:
        name = f"user-{number:05}"
        context = self.contexts[name] = tuple(self.generator.normal(size=3).round(6).tolist())
        exclude = ("ad-1",) if number % 17 == 0 else ()
        value = encode_event(Arrival(session_id=name, occurred_at=at, context=context, exclude=exclude))
        self._send(at, self.topics.arrivals, name, value)
        if not oddities:
            return
        if number % 11 == 0:  # a repeated arrival
            self._send(at + 100, self.topics.arrivals, name, value)
        if number % 23 == 0:
            self._send(at, self.topics.arrivals, name, b"\xff\xfe is no UTF-8")
        if number % 29 == 0:
            forged = Feedback(session_id=name, occurred_at=at, position=1, arm="nobody's", clicked=True)
            self._send(at, self.topics.clicks, name, encode_event(forged))
        if number % 31 == 0:  # a second arrival with the same id
            again = Arrival(session_id=name, occurred_at=at + 1, context=context)
            self._send(at + 50, self.topics.arrivals, name, encode_event(again))

    def _send(self, at: int, topic: str, name: str, value: bytes) -> None:
        heapq.heappush(self.agenda, (at, len(self.contexts) * 1000 + len(self.agenda), topic, name.encode(), value))
        self.last = max(self.last, at)

    def go(self, orders: Sequence[tuple[int, Order]]) -> Embedded:
        """Run until every window is closed, half a second at a time."""
        waiting = list(orders)
        now = START
        while self.agenda or now < self.last + 20_000:
            now += 500
            while self.agenda and self.agenda[0][0] <= now:
                at, _, topic, key, value = heapq.heappop(self.agenda)
                self.runner.send(topic, value, key=key, timestamp=at)
            for _, value in self.runner.pump():
                self._answer(orjson.loads(value), now)
            # Between sessions and progress: the journal has sessions that are ahead of the watermark.
            while waiting and START + waiting[0][0] <= now:
                self.runner.order(waiting.pop(0)[1])
            self.runner.advance(now)
        return self.runner

    def _answer(self, decision: dict[str, Any], now: int) -> None:
        """Let a user pass over an ad, click on it, or leave."""
        name, position, arm = decision["session_id"], decision["position"], decision["arm"]
        if arm is None or (name, position) in self.answered or self.generator.random() < 0.08:
            return
        self.answered.add((name, position))
        odds = self.odds(int(arm.removeprefix("ad-")), self.contexts[name], now)
        at = now + int(self.generator.integers(100, 1_500))
        feedback = Feedback(
            session_id=name,
            occurred_at=at,
            position=position,
            arm=arm,
            clicked=bool(self.generator.random() < 1 / (1 + np.exp(-odds))),
        )
        self._send(at, self.topics.clicks, name, encode_event(feedback))

    def odds(self, ad: int, context: tuple[float, ...], now: int) -> float:
        """Return the true log-odds of a click."""
        return float(TRUTH[ad] + 0.7 * context[0])


def record(
    path: Path | str,
    *,
    sessions: int = 300,
    rate: int = 4,
    seed: int = 0,
    oddities: bool = True,
    orders: Sequence[tuple[int, Order]] = ORDERS,
    **embedded: Any,
) -> Embedded:
    """Write the log of a run; return the runner as it ended."""
    with LogWriter(path) as log:
        return Run(sessions=sessions, rate=rate, seed=seed, oddities=oddities, tap=log, **embedded).go(orders)


if __name__ == "__main__":
    GOLDEN.unlink(missing_ok=True)
    runner = record(GOLDEN)
    newest = runner.versions.newest
    facts = {"version": newest.version, "sha256": newest.sha256, "machine": fingerprint()}
    FACTS.write_bytes(orjson.dumps(facts, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
