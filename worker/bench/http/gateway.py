"""`adcascade bench http --gateway`: sessions over the gateway and straight over Kafka, in turn, to the same worker.

Kafka's own wait is that of the client of `bench kafka`, which sends arrivals only. A wait is from sending an arrival to
its first decision.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Final

import numpy as np

from worker.bandit.arrays import Floats
from worker.bench.figures import Figure
from worker.bench.http.servers import ServerProcess
from worker.bench.http.servers import played as run_client
from worker.bench.http.sessions import WARM, Played
from worker.bench.kafka.client import Client
from worker.bench.kafka.processes import running_broker, worker_process
from worker.bench.kafka.topics import learned, new_topics
from worker.kafka.connection import Connection
from worker.stream.topology import Topics

PARTITIONS: Final = 8
RATE: Final = 200  # sessions per second
ROUNDS: Final = 5
SECONDS: Final = 6.0
FIGURES: Final = 5


def measure(address: str | None, *, rounds: int = ROUNDS, seconds: float = SECONDS) -> Iterator[Figure | str]:
    """Yield the figures, and between them the step that follows."""
    yield "starting the broker"
    with (
        running_broker(address) as connection,
        tempfile.TemporaryDirectory(prefix="adcascade-bench-") as folder,
        new_topics(connection, PARTITIONS, learned()) as names,
        worker_process(connection.servers[0], names, Path(folder)) as worker,
        closing(Client(connection, names, PARTITIONS)) as client,
    ):
        client.wait_until_served(worker.check)
        with ServerProcess("gateway", Path(folder), _gateway(connection, names)) as gateway:
            own: list[Floats] = []
            played: list[Played] = []
            for turn in range(rounds):
                yield f"straight over Kafka, round {turn + 1} of {rounds}"
                client.play(RATE, WARM, worker.check)
                own.append(client.play(RATE, seconds, worker.check))
                yield f"over the gateway, round {turn + 1} of {rounds}"
                played.append(_play(gateway.url, seconds))
    yield from figures(own, played)


def figures(own: list[Floats], played: list[Played]) -> Iterator[Figure]:
    """Yield the figures of rounds: waits straight over Kafka, and what the clients of the gateway saw."""
    rounds = f"medians of {len(played)} rounds"
    through = [np.array(one.arrivals) for one in played]
    where = f"at {RATE} sessions/s"
    for name, waits, what in (
        ("Kafka's own", own, "from arrival to decision, as bench kafka sees it"),
        ("gateway", through, "from arrival to answer"),
    ):
        detail = f"p50 {what}; p99 {_middle(waits, 0.99):.2f} ms, {rounds}"
        yield Figure(f"{name}, {where}", _middle(waits, 0.5), "ms", detail=detail)
    more = sorted(float(np.median(mine) - np.median(other)) for mine, other in zip(through, own, strict=True))
    spread = f"p50, round by round from {more[0]:.2f} to {more[-1]:.2f}"
    yield Figure("gateway − Kafka's own", float(np.median(more)), "ms", most=2, detail=spread)
    feedback = [np.array(one.feedback) for one in played]
    detail = f"p50 from a click or a pass to the next decision; p99 {_middle(feedback, 0.99):.2f} ms"
    yield Figure(f"gateway, feedback, {where}", _middle(feedback, 0.5), "ms", detail=detail)
    wrong = sum(one.failed + one.fallbacks for one in played)
    sessions = sum(one.sessions for one in played)
    yield Figure("failed or fallback answers", float(wrong), "", most=0, detail=f"of {sessions:,} sessions")


def _middle(rounds: list[Floats], share: float) -> float:
    return float(np.median([np.quantile(waits, share) for waits in rounds]))


def _gateway(connection: Connection, names: Topics) -> list[str]:
    return [
        *("worker", "gateway", "--broker", connection.servers[0], "--prefix", names.prefix),
        *("--port", "0", "--log-format", "text"),
        *("--deadline", "5s"),  # an answer that was given up would not be measured
    ]


def _play(url: str, seconds: float) -> Played:
    return run_client(Played, seconds, "worker.bench.http.sessions", url, str(seconds), str(RATE))
