"""Valid traffic with a known truth: users who arrive, look at what they are shown, and click or pass it over.

Its own client code, on librdkafka and the json module: what it sends and reads does not go through adcascade.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import threading
import time
import zlib
from collections import deque
from collections.abc import Awaitable
from concurrent.futures import Future
from typing import Any, Final

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition

from tests.kafka.hostile.ledger import Ledger, Sent, Timeline, now_ms

#: Ad to (revenue of a click, log-odds of a click).
ADS: Final = {"ad-0": (1.0, -2.0), "ad-1": (0.6, -1.0), "ad-2": (0.3, 0.2), "ad-3": (0.8, -3.0), "ad-4": (0.5, -1.5)}
DIM: Final = 3
RATE: Final = 15.0  # arrivals per second
#: Clients choose how they compress their batches.
CODECS: Final = ("none", "gzip", "snappy", "lz4", "zstd")
QUIET: Final = 10.0  # seconds between two lines about errors of the client
PAUSE: Final = 0.01  # seconds between two looks at decisions and delivery reports

#: What a broker refuses for good.
REFUSALS: Final = (KafkaError.INVALID_TIMESTAMP, KafkaError.MSG_SIZE_TOO_LARGE)


class Driver:
    """Runs in a thread of its own, from `start` to `close`."""

    def __init__(self, address: str, prefix: str, ledger: Ledger, timeline: Timeline, seed: int) -> None:
        self.ledger, self.timeline = ledger, timeline
        self._address, self._prefix = address, prefix
        self._chance = random.Random(seed)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._stopped = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._number = 0
        self._reported = 0.0
        #: Session to (its arrival, its context) for all arrivals of this driver; and those that wait for an answer.
        self.contexts: dict[str, list[float]] = {}
        self.waiting: dict[str, int] = {}
        #: Recent (key, value) per topic, to be sent again; recent first decisions, to be forged.
        self.recent: dict[str, deque[tuple[bytes, bytes]]] = {
            name: deque(maxlen=200) for name in ("arrivals", "clicks")
        }
        self.decisions: deque[dict[str, Any]] = deque(maxlen=200)
        #: The time of the last arrival.
        self.last_arrival = 0
        #: The last version and the end of the last closed window, as seen in the topics.
        self.version, self.closed_until = -1, 0

    # ── from other threads ───────────────────────────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        self._thread.start()
        self._run(self._open())

    def send(
        self,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        *,
        what: str,
        reasons: frozenset[str] = frozenset(),
        body: dict[str, Any] | None = None,
        timestamp: int | None = None,
    ) -> None:
        """Send a record until the broker has it, or refuses it."""
        sent = self.ledger.add(topic, key, value, Sent(topic, reasons, what, body))
        self._loop.call_soon_threadsafe(self._begin, self._deliver(sent, key, value, timestamp))

    def stop_arrivals(self) -> None:
        self._stopped = True

    def settled(self) -> bool:
        """Whether everything is sent."""
        return not self._tasks

    def close(self) -> None:
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Awaitable[Any]) -> Any:
        waited: Future[Any] = asyncio.run_coroutine_threadsafe(work, self._loop)  # type: ignore[arg-type]
        return waited.result(300)

    # ── sending ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _open(self) -> None:
        common = {"bootstrap.servers": self._address, "log_level": 2, "reconnect.backoff.max.ms": 1_000}
        common["topic.metadata.refresh.interval.ms"] = 10_000  # a broker that starts does not know its topics
        # As the Java client does. The number of a record that is sent again is the same.
        writing = {"linger.ms": 5, "message.timeout.ms": 10_000, "partitioner": "murmur2_random"}
        self._producers = [Producer({**common, **writing, "compression.type": codec}) for codec in CODECS]
        reading = {"group.id": "hostile-driver", "enable.auto.commit": False, "auto.offset.reset": "earliest"}
        self._consumer = Consumer({**common, **reading})
        known = self._consumer.list_topics(timeout=120).topics
        names = [f"{self._prefix}.{name}" for name in ("decisions", "parameters")]
        self._consumer.assign([TopicPartition(name, p, 0) for name in names for p in known[name].partitions])
        self._readers = [self._loop.create_task(self._poll()), self._loop.create_task(self._arrive())]

    async def _close(self) -> None:
        for task in (*self._readers, *self._tasks):
            task.cancel()
        await asyncio.gather(*self._readers, *self._tasks, return_exceptions=True)
        self._consumer.close()

    def _begin(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _deliver(self, sent: Sent, key: bytes | None, value: bytes | None, timestamp: int | None) -> None:
        producer = self._producers[zlib.crc32(value or b"") % len(CODECS)]
        while True:
            error = await self._reported_error(producer, f"{self._prefix}.{sent.topic}", key, value, timestamp or 0)
            if error is None:
                sent.acknowledged = sent.acknowledged or now_ms()
                return
            if error.code() in REFUSALS:
                sent.refused = error.name()
                return
            self._report(error)
            await asyncio.sleep(0.3)

    async def _reported_error(
        self, producer: Producer, topic: str, key: bytes | None, value: bytes | None, timestamp: int
    ) -> KafkaError | None:
        """Send a record; return the error of its delivery report."""
        report: asyncio.Future[KafkaError | None] = self._loop.create_future()

        def on_delivery(error: KafkaError | None, message: Message) -> None:
            if not report.done():
                report.set_result(error)

        try:
            producer.produce(topic, value, key, timestamp=timestamp, on_delivery=on_delivery)
        except KafkaException as refused:
            return refused.args[0]
        return await report

    def _report(self, error: KafkaError) -> None:
        """Note an error of the client, which tries again; one line for all that come together."""
        now = time.monotonic()
        if now > self._reported + QUIET:
            self.timeline.note(f"driver: {error.name()}; it tries again")
            self._reported = now

    async def _arrive(self) -> None:
        """Let users arrive, at random times."""
        while not self._stopped:
            await asyncio.sleep(self._chance.expovariate(RATE))
            self._number += 1
            session = f"user-{self._number}"
            context = [round(self._chance.gauss(0, 1), 3) for _ in range(DIM)]
            body: dict[str, Any] = {"session_id": session, "occurred_at": now_ms(), "context": context}
            if self._chance.random() < 0.15:
                body["exclude"] = [self._chance.choice(list(ADS))]
            self.arrive(session.encode(), body)

    def arrive(self, key: bytes | None, body: dict[str, Any], what: str = "arrival") -> None:
        """Send a valid arrival, and wait for its answer."""
        session, value = body["session_id"], json.dumps(body).encode()
        self.contexts[session] = body["context"]
        self.waiting[session] = self.last_arrival = body["occurred_at"]
        if key is not None:
            self.recent["arrivals"].append((key, value))
        self.send("arrivals", key, value, what=what, body=body)

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _poll(self) -> None:
        """Take decisions, versions and delivery reports for as long as this runs, whatever happens to the broker."""
        while True:
            for producer in self._producers:
                producer.poll(0)
            for message in self._consumer.consume(500, 0):
                if (error := message.error()) is not None:
                    self._report(error)
                else:
                    self._take(message.topic().removeprefix(f"{self._prefix}."), json.loads(message.value()))
            await asyncio.sleep(PAUSE)

    def _take(self, topic: str, body: dict[str, Any]) -> None:
        if topic == "parameters":
            self.version = max(self.version, body["version"])
            self.closed_until = max(self.closed_until, body["window_end"] or 0)
        elif self.waiting.pop(body["session_id"], None) is not None:
            self.decisions.append(body)
            self._begin(self._look(body))

    async def _look(self, decision: dict[str, Any]) -> None:
        """Look at the slate, one ad after the other, as a user does."""
        session = decision["session_id"]
        chance = random.Random(session)
        warmth = 0.5 * self.contexts[session][0]
        for place, ad in enumerate(decision["slate"]):
            await asyncio.sleep(chance.uniform(0.05, 0.5))
            if chance.random() < 0.1:
                return
            odds = ADS.get(ad, (1.0, -1.0))[1] + warmth
            clicked = chance.random() < 1 / (1 + math.exp(-odds))
            self.answer(session.encode(), reaction(decision, place, clicked=clicked), again=chance.random() < 0.1)
            if clicked:
                return

    def answer(self, key: bytes | None, body: dict[str, Any], *, again: bool = False, what: str = "feedback") -> None:
        """Send valid feedback."""
        value = json.dumps(body).encode()
        if key is not None:
            self.recent["clicks"].append((key, value))
        for _ in range(2 if again else 1):
            self.send("clicks", key, value, what=what, body=body)


def reaction(decision: dict[str, Any], place: int, *, clicked: bool) -> dict[str, Any]:
    """Return the feedback of a user to an ad of a decision, now; `place` counts from 0."""
    return {
        "session_id": decision["session_id"],
        "occurred_at": now_ms(),
        "position": decision["position"] + place,
        "arm": decision["slate"][place],
        "clicked": clicked,
        "token": decision["tokens"][place],
    }
