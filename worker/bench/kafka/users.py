"""Users who wait: each reports a display only when its decision has come, as the clients of a real site do.

The sender of `sender` plays its records by the clock, whatever the worker does. After a standstill it has reported on
displays that nobody was shown, and a worker rightly skips those decisions. So these users are for measurements in which
workers stand still.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from worker.bench.kafka.recording import Script, live_arrival, live_click
from worker.client.transport import Keyed, Transport
from worker.stream.decoding import decode_decision
from worker.stream.topology import Record

LOOK = 0.2  # seconds between a decision and its feedback
TICK = 0.007  # seconds between two batches: not a divisor of the periods of a worker
NAME = b"waiting-"  # prefix of the session ids; the number of the session follows


class WaitingUsers:
    """Play sessions; `sent` and `answered` are the nanoseconds of the monotonic clock by session.

    A session that has no decision is missing in `answered`.
    """

    def __init__(self, transport: Transport, scripts: Sequence[Script]) -> None:
        self._transport, self._scripts = transport, scripts
        self._feedback: dict[int, list[tuple[int, int]]] = defaultdict(list)  # by tick: sessions and positions
        self._positions: dict[int, int] = {}
        self._deliveries: list[asyncio.Future[Any]] = []
        self._tick = 0
        self.sent: list[int] = []
        self.answered: dict[int, int] = {}

    async def play(self, rate: float, seconds: float, silence: float) -> None:
        """Open `rate` sessions per second; end when all are answered, or no decision has come for `silence` seconds."""
        await self._transport.start(self.receive)
        try:
            begun = time.monotonic()
            while self._tick * TICK < seconds or self._waits(silence):
                await asyncio.sleep(max(0.0, begun + self._tick * TICK - time.monotonic()))
                self.step(int(rate * min(self._tick * TICK, seconds)))
            await asyncio.gather(*self._deliveries)
        finally:
            await self._transport.stop()

    def _waits(self, silence: float) -> bool:
        last = max(self.answered.values(), default=self.sent[-1])
        return len(self.answered) < len(self.sent) and time.monotonic_ns() - last < silence * 1e9

    def step(self, sessions: int) -> None:
        """Send the feedback that is due at this tick, and the arrivals up to this number of sessions."""
        now = time.time_ns() // 1_000_000
        records = [
            Keyed("clicks", key, live_click(self._script(number), position - 1, key, now))
            for number, position in self._feedback.pop(self._tick, ())
            for key in [_key(number)]
        ]
        for number in range(len(self.sent), sessions):
            records.append(Keyed("arrivals", _key(number), live_arrival(self._script(number), _key(number), now)))
            self.sent.append(time.monotonic_ns())
        self._deliveries += self._transport.send_all(records)
        self._tick += 1

    def receive(self, decisions: Sequence[Record]) -> None:
        """Note the first decision of each session; repeats and earlier positions change nothing."""
        for record in decisions:
            if record.key is None or record.value is None or not record.key.startswith(NAME):
                continue
            number, position = int(record.key.removeprefix(NAME)), decode_decision(record.value).position
            self.answered.setdefault(number, time.monotonic_ns())
            if self._positions.get(number, 0) < position <= len(self._script(number).clicks):
                self._positions[number] = position
                self._feedback[self._tick + round(LOOK / TICK)].append((number, position))

    def _script(self, number: int) -> Script:
        return self._scripts[number % len(self._scripts)]


def _key(number: int) -> bytes:
    return b"%b%d" % (NAME, number)
