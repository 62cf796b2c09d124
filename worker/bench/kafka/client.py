"""The client of `adcascade bench kafka`: sends arrivals at a rate, and measures the wait for each decision.

One process has both ends, so one clock measures. The main thread sends, and one thread reads decisions. Both use
librdkafka, and wait most of the time: the server under measurement has the processors.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterable

import numpy as np
from confluent_kafka import Producer, TopicPartition

from worker.bandit.arrays import Floats
from worker.bench.kafka.topics import arrival
from worker.errors import FailedError
from worker.kafka.clients import END, REQUEST_TIMEOUT, TopicReader, offsets_of
from worker.kafka.connection import Connection
from worker.stream.topology import Topics

PATIENCE = 60.0  # seconds without any decision before a play fails
LOOK = 0.02  # seconds between two checks for missing decisions


class Client:
    """Sends arrivals and reads decisions. `check` is called while it waits, and raises if the server has ended."""

    def __init__(self, connection: Connection, names: Topics, partitions: int) -> None:
        self._names, self._partitions = names, partitions
        self._producer = Producer(connection.configuration(acks="all", linger_ms=0))
        self._producer.list_topics(names.arrivals, timeout=REQUEST_TIMEOUT)  # the first arrival waits for no metadata
        self._reader = TopicReader(connection, enable_partition_eof=False)
        decisions = [TopicPartition(names.decisions, number) for number in range(partitions)]
        self._reader.read_from(offsets_of(self._reader.admin, decisions, END))
        self._answered: dict[bytes, int] = {}
        self._plays = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._read, name="adcascade-bench", daemon=True)
        self._thread.start()
        gc.collect()
        gc.freeze()  # a search of all of memory would take tens of milliseconds of a play

    def close(self) -> None:
        """Disconnect."""
        self._closing.set()
        self._thread.join()
        self._reader.close()
        self._producer.close()
        gc.unfreeze()

    def wait_until_served(self, check: Callable[[], None]) -> None:
        """Return when an arrival of every partition has got its decision."""
        self._waits(self._send([0.0] * self._partitions), check)

    def play(self, rate: float, seconds: float, check: Callable[[], None]) -> Floats:
        """Send arrivals at random times, `rate` per second on average; return their waits in milliseconds.

        Raises `FailedError` if an arrival gets no decision.
        """
        gaps = np.random.default_rng(7).exponential(1 / rate, round(rate * seconds))
        return self._waits(self._send(np.cumsum(gaps).tolist()), check)

    def _send(self, times: Iterable[float]) -> dict[bytes, int]:
        """Send an arrival at each of the times, in seconds from now; return when they were sent."""
        self._plays += 1
        self._answered = {}
        sent: dict[bytes, int] = {}
        begun = time.monotonic()
        for number, due in enumerate(times):
            if (pause := begun + due - time.monotonic()) > 0:
                time.sleep(pause)
            session = b"live-%d-%d" % (self._plays, number)
            value = arrival(session, number)
            sent[session] = time.monotonic_ns()
            self._producer.produce(self._names.arrivals, value, session, number % self._partitions)
            self._producer.poll(0)
        return sent

    def _waits(self, sent: dict[bytes, int], check: Callable[[], None]) -> Floats:
        answered, missing, since = self._answered, len(sent), time.monotonic()
        while missing:
            self._producer.poll(LOOK)
            check()
            left = sum(session not in answered for session in sent)
            if left < missing:
                missing, since = left, time.monotonic()
            if missing and time.monotonic() - since > PATIENCE:
                raise FailedError(f"{missing} of {len(sent)} arrivals got no decision within {PATIENCE:.0f} s")
        return np.array([answered[session] - begun for session, begun in sent.items()]) / 1e6

    def _read(self) -> None:
        while not self._closing.is_set():
            messages = self._reader.poll(0.1)
            now = time.monotonic_ns()
            for message in messages:
                self._answered.setdefault(message.key(), now)
