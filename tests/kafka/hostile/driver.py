"""Valid traffic with a known truth: users who arrive, look at what they are shown, and click or pass it over.

Its own client code, on librdkafka and the json module: what it sends and reads does not go through adcascade.
"""

from __future__ import annotations

import heapq
import itertools
import json
import math
import random
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition

from tests.kafka.hostile.ledger import Ledger, Sent, Timeline, now_ms

#: Ad to (revenue of a click, log-odds of a click).
ADS: Final = {"ad-0": (1.0, -2.0), "ad-1": (0.6, -1.0), "ad-2": (0.3, 0.2), "ad-3": (0.8, -3.0), "ad-4": (0.5, -1.5)}
DIM: Final = 3
RATE: Final = 15.0  # arrivals per second
#: Clients choose how they compress their batches.
CODECS: Final = ("none", "gzip", "snappy", "lz4", "zstd")
QUIET: Final = 10.0  # seconds between two lines about errors of the client
PAUSE: Final = 0.01  # seconds between two looks at the agenda and at delivery reports

#: What a broker refuses for good.
REFUSALS: Final = (KafkaError.INVALID_TIMESTAMP, KafkaError.MSG_SIZE_TOO_LARGE)


class Driver:
    """Does what is due, in a thread of its own, from `start` to `close`; other threads may send, too."""

    def __init__(self, address: str, prefix: str, ledger: Ledger, timeline: Timeline, seed: int) -> None:
        self.ledger, self.timeline = ledger, timeline
        self._prefix = prefix
        self._chance = random.Random(seed)
        #: What is to be done: (when, number, action). The lock is held while something is done.
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._lock = threading.RLock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._stopped = False
        self._undelivered = 0
        self._number = 0
        self._reported = 0.0
        #: Session to its context for all arrivals of this driver; and the times of those that wait for an answer.
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
        common = {"bootstrap.servers": address, "log_level": 2, "reconnect.backoff.max.ms": 1_000}
        common["topic.metadata.refresh.interval.ms"] = 10_000  # a broker that starts does not know its topics
        # As the Java client does. The number of a record that is sent again is the same.
        writing = {"linger.ms": 5, "message.timeout.ms": 10_000, "partitioner": "murmur2_random"}
        self._producers = [Producer({**common, **writing, "compression.type": codec}) for codec in CODECS]
        reading = {"group.id": "hostile-driver", "enable.auto.commit": False, "auto.offset.reset": "earliest"}
        self._consumer = Consumer({**common, **reading})

    # ── from other threads ───────────────────────────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        known = self._consumer.list_topics(timeout=120).topics
        names = [f"{self._prefix}.{name}" for name in ("decisions", "parameters")]
        self._consumer.assign([TopicPartition(name, p, 0) for name in names for p in known[name].partitions])
        self._after(0, self._let_arrive)
        self._thread.start()

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
        with self._lock:
            self._undelivered += 1
            self._after(0, partial(self._deliver, sent, key, value, timestamp or 0))

    def stop_arrivals(self) -> None:
        self._stopped = True

    def settled(self) -> bool:
        """Whether everything is done and delivered."""
        with self._lock:
            return not self._agenda and not self._undelivered

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        self._consumer.close()

    # ── in the thread ────────────────────────────────────────────────────────────────────────────────────────────────

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        with self._lock:
            heapq.heappush(self._agenda, (time.monotonic() + seconds, next(self._order), action))

    def _run(self) -> None:
        """Do what is due, and take decisions, versions and delivery reports, whatever happens to the broker."""
        while not self._ended.is_set():
            messages = self._consumer.consume(500, PAUSE)
            with self._lock:
                while self._agenda and self._agenda[0][0] <= time.monotonic():
                    heapq.heappop(self._agenda)[2]()
                for producer in self._producers:
                    producer.poll(0)
                for message in messages:
                    if (error := message.error()) is not None:
                        self._report(error)
                    else:
                        self._take(message.topic().removeprefix(f"{self._prefix}."), json.loads(message.value()))

    def _deliver(self, sent: Sent, key: bytes | None, value: bytes | None, timestamp: int) -> None:
        def on_delivery(error: KafkaError | None, _: object = None) -> None:
            if error is not None and error.code() not in REFUSALS:
                self._report(error)
                self._after(0.3, partial(self._deliver, sent, key, value, timestamp))
                return
            self._undelivered -= 1
            if error is None:
                sent.acknowledged = sent.acknowledged or now_ms()
            else:
                sent.refused = error.name()

        producer = self._producers[zlib.crc32(value or b"") % len(CODECS)]
        try:
            producer.produce(f"{self._prefix}.{sent.topic}", value, key, timestamp=timestamp, on_delivery=on_delivery)
        except KafkaException as refused:
            on_delivery(refused.args[0])

    def _report(self, error: KafkaError) -> None:
        """Note an error of the client, which tries again; one line for all that come together."""
        now = time.monotonic()
        if now > self._reported + QUIET:
            self.timeline.note(f"driver: {error.name()}; it tries again")
            self._reported = now

    def _take(self, topic: str, body: dict[str, Any]) -> None:
        if topic == "parameters":
            self.version = max(self.version, body["version"])
            self.closed_until = max(self.closed_until, body["window_end"] or 0)
        elif self.waiting.pop(body["session_id"], None) is not None:
            self.decisions.append(body)
            self._look_at(body, 0, random.Random(body["session_id"]))

    # ── users ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _let_arrive(self) -> None:
        """Let a user arrive, and the next one after a random time."""
        if self._stopped:
            return
        self._number += 1
        session = f"user-{self._number}"
        context = [round(self._chance.gauss(0, 1), 3) for _ in range(DIM)]
        body: dict[str, Any] = {"session_id": session, "occurred_at": now_ms(), "context": context}
        if self._chance.random() < 0.15:
            body["exclude"] = [self._chance.choice(list(ADS))]
        self.arrive(session.encode(), body)
        self._after(self._chance.expovariate(RATE), self._let_arrive)

    def arrive(self, key: bytes | None, body: dict[str, Any], what: str = "arrival") -> None:
        """Send a valid arrival, and wait for its answer."""
        session, value = body["session_id"], json.dumps(body).encode()
        self.contexts[session] = body["context"]
        self.waiting[session] = self.last_arrival = body["occurred_at"]
        if key is not None:
            self.recent["arrivals"].append((key, value))
        self.send("arrivals", key, value, what=what, body=body)

    def _look_at(self, decision: dict[str, Any], place: int, chance: random.Random) -> None:
        """Let a user look at an ad of a slate for a while, and then answer, and look at the next."""

        def react() -> None:
            session = decision["session_id"]
            odds = ADS.get(decision["slate"][place], (1.0, -1.0))[1] + 0.5 * self.contexts[session][0]
            clicked = chance.random() < 1 / (1 + math.exp(-odds))
            self.answer(session.encode(), reaction(decision, place, clicked=clicked), again=chance.random() < 0.1)
            if not clicked:
                self._look_at(decision, place + 1, chance)

        if place < len(decision["slate"]) and chance.random() > 0.1:  # the others leave
            self._after(chance.uniform(0.05, 0.5), react)

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
