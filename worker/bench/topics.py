"""Workers on topics that hold a learned version, and arrivals for them: at a rate by `worker.client`, or as a backlog.

No window closes and no session expires during a run, so a worker plans with the same version all the time.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import orjson
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient

from worker.bandit.arrays import Floats
from worker.bench.processes import ChildProcess
from worker.bench.stream import CONTEXTS, HORIZON, SECOND, closed_journal, fold, record_traffic
from worker.client import Client
from worker.errors import FailedError
from worker.kafka.clients import END, REQUEST_TIMEOUT, admin_client, durable_producer, offsets_of, write
from worker.kafka.connection import Connection
from worker.kafka.topics import TopicLayout, create
from worker.stream.parameters import Parameters
from worker.stream.topology import Topics
from worker.stream.version_records import encode_parameters

WINDOW, TIMEOUT, LATENESS = 3_600 * SECOND, 3_600 * SECOND, 5 * SECOND  # settings of the measured worker
LEARNED_FROM: Final = 20  # seconds of event time that a version is learned from
BATCH: Final = 16 << 10  # bytes of a batch of the backlog: the default of Kafka's own producers
PATIENCE: Final = 60.0  # seconds for a decision, or to write a backlog


@contextmanager
def new_topics(connection: Connection, partitions: int, parameters: Parameters) -> Iterator[Topics]:
    """Yield new topics with a published version; delete them at the end."""
    names = Topics(f"bench-{uuid.uuid4().hex[:8]}")
    create(connection, names, TopicLayout(partitions=partitions))
    admin = admin_client(connection)
    try:
        with closing(durable_producer(connection)) as producer:
            write(producer, names.parameters, encode_parameters(parameters), b"%d" % parameters.version)
        yield names
    finally:
        ours = [name for name in admin.list_topics(timeout=REQUEST_TIMEOUT).topics if name.startswith(names.prefix)]
        for deleted in admin.delete_topics(ours).values():
            deleted.exception()  # waits: the broker may be stopped right after this


def learned() -> Parameters:
    """Return a version that was learned from simulated users; it precedes any journal."""
    newest = fold(closed_journal(record_traffic(LEARNED_FROM).journal)).current
    return replace(
        newest,
        version=1,
        settings=replace(newest.settings, window=WINDOW, session_timeout=TIMEOUT, lateness=LATENESS),
        effective_at=0,
        made_at=0,
        window_end=None,
        journal_offset=-1,
        resume_offset=0,
        progress={},
    )


def worker_process(broker: str, names: Topics, folder: Path, **more: str) -> ChildProcess:
    """Start a worker, with `more` options. Its arms and its dimension come from the published version."""
    options = {"broker": broker, "prefix": names.prefix, "group": names.prefix, "horizon": HORIZON}
    options |= {"window": f"{WINDOW}ms", "session_timeout": f"{TIMEOUT}ms", "lateness": f"{LATENESS}ms"}
    options |= {"log_level": "warning", **more}
    flags = [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    return ChildProcess("the worker", ["worker", "worker", *flags], folder)


# ── arrivals at a rate ───────────────────────────────────────────────────────────────────────────────────────────────


def play(connection: Connection, names: Topics, rate: float, seconds: float, check: Callable[[], None]) -> Floats:
    """Send arrivals at random times, `rate` per second on average; return the waits for decisions in milliseconds.

    Raises `FailedError` if an arrival gets no decision, or what `check` raises then.
    """
    waits = asyncio.run(_play(connection, names, rate, seconds))
    if unanswered := int(np.isnan(waits).sum()):
        check()
        raise FailedError(f"{unanswered} of {len(waits)} arrivals got no decision within {PATIENCE:.0f} s")
    return waits


async def _play(connection: Connection, names: Topics, rate: float, seconds: float) -> Floats:
    loop = asyncio.get_running_loop()
    async with Client(connection, prefix=names.prefix, timeout=PATIENCE) as client:

        async def arrive(number: int) -> float:
            began = loop.time()
            decision = await client.arrive(CONTEXTS[number % len(CONTEXTS)])
            return np.nan if decision.timed_out else 1000 * (loop.time() - began)

        begun, waits = loop.time(), []
        gaps = np.random.default_rng(7).exponential(1 / rate, round(rate * seconds))
        for number, due in enumerate(np.cumsum(gaps).tolist()):
            await asyncio.sleep(begun + due - loop.time())
            waits.append(loop.create_task(arrive(number)))
        return np.array(await asyncio.gather(*waits))


# ── a backlog ────────────────────────────────────────────────────────────────────────────────────────────────────────


def arrival(session: bytes, number: int) -> bytes:
    """Return an arrival at this moment; `number` chooses its context.

    >>> orjson.loads(arrival(b"s", 3)).keys()
    dict_keys(['session_id', 'occurred_at', 'context'])
    """
    now, context = time.time_ns() // 1_000_000, orjson.dumps(CONTEXTS[number % len(CONTEXTS)])
    return b'{"session_id":"%b","occurred_at":%d,"context":%b}' % (session, now, context)


def write_backlog(connection: Connection, names: Topics, count: int, partitions: int) -> None:
    """Write `count` arrivals, evenly over the partitions."""
    settings = connection.configuration(acks="all", batch_size=BATCH, queue_buffering_max_messages=count)
    with closing(Producer(settings)) as producer:
        for partition in range(partitions):
            sessions = ((b"waiting-%d" % number, number) for number in range(partition, count, partitions))
            records = [{"key": session, "value": arrival(session, number)} for session, number in sessions]
            producer.produce_batch(names.arrivals, records, partition)
        if left := producer.flush(PATIENCE):
            raise FailedError(f"{left} of {count} arrivals could not be written within {PATIENCE:.0f} s")


def decisions_in(admin: AdminClient, names: Topics, partitions: int) -> int:
    """Return the number of decisions that were written so far."""
    places = [(names.decisions, number) for number in range(partitions)]
    return sum(offsets_of(admin, places, END).values())
