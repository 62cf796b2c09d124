"""A transport without Kafka: what is sent is kept, and the test decides what is acknowledged and answered."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson

from worker.client.transport import Keyed, Receive, UndeliveredError
from worker.stream.topology import Record


class FakeTransport:
    """Acknowledges at once unless `holds` is set; answers arrivals at once if `answers` has a slate."""

    def __init__(self, *, answers: tuple[str, ...] | None = None, holds: bool = False) -> None:
        self.trouble: str | None = None
        self.sent: list[Keyed] = []
        self.answers, self.holds, self.stopped = answers, holds, False
        self.tokens = False
        self._receive: Receive = lambda _: None
        self._futures: list[asyncio.Future[Any]] = []

    async def start(self, receive: Receive) -> None:
        self._receive = receive

    async def stop(self) -> None:
        self.stopped = True

    def send(self, record: Keyed) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        self.sent.append(record)
        future = loop.create_future()
        self._futures.append(future)
        if not self.holds:
            self.acknowledge()
        if record.topic == "arrivals" and self.answers is not None:
            loop.call_soon(self.decide, orjson.loads(record.value)["session_id"], 1, self.answers)
        return future

    # ── what the brokers and the workers do ──────────────────────────────────────────────────────────────────────────

    def acknowledge(self) -> None:
        for future in self._futures:
            future.set_result(None)
        self._futures.clear()

    def fail(self) -> None:
        for future in self._futures:
            future.set_exception(UndeliveredError("no broker accepted the record"))
        self._futures.clear()

    def decide(self, session_id: str, position: int, slate: tuple[str, ...]) -> None:
        """Deliver the decision of a position; `slate` has the ads from there on."""
        self.deliver(session_id.encode(), decision(session_id, position, slate, tokens=self.tokens))

    def deliver(self, key: bytes | None, value: bytes | None) -> None:
        self._receive([Record("ads.decisions", 3, 0, 0, key, value)])

    # ── what was sent ────────────────────────────────────────────────────────────────────────────────────────────────

    def bodies(self, topic: str) -> list[dict[str, Any]]:
        return [orjson.loads(record.value) for record in self.sent if record.topic == topic]


def decision(session_id: str, position: int, slate: tuple[str, ...], *, tokens: bool = False) -> bytes:
    """Return the record of a decision."""
    body: dict[str, Any] = {
        "session_id": session_id,
        "arrived_at": 1_000,
        "position": position,
        "arm": slate[0] if slate else None,
        "slate": slate,
        "mode": "exploit" if slate else "none",
        "propensity": 1.0,
        "parameters_version": 7,
        "value": 0.5,
    }
    if tokens:
        body["tokens"] = [f"token-{place}" for place in range(position, position + len(slate))]
    return orjson.dumps(body)
