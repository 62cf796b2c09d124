"""Topics of `adcascade bench kafka`: the version that the worker plans with, arrivals, and the decisions on them.

No window closes and no session expires during a run, so the worker plans with the same version all the time.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Final

import numpy as np
import orjson
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from worker.bench.stream import DIM, HORIZON, SECOND, simulated_users
from worker.embedded.runner import Embedded
from worker.errors import FailedError
from worker.kafka.clients import END, REQUEST_TIMEOUT, admin_client, durable_producer, offsets_of, write
from worker.kafka.connection import Connection
from worker.kafka.topics import TopicLayout, create
from worker.simulation.users import TIDY, Users
from worker.stream.decoding import decode_decision
from worker.stream.parameters import Parameters
from worker.stream.settings import LearningSettings
from worker.stream.topology import Topics
from worker.stream.version_records import encode_parameters

WINDOW, TIMEOUT, LATENESS = 3_600 * SECOND, 3_600 * SECOND, 5 * SECOND  # settings of the measured worker
QUICK: Final = replace(TIDY, look=(50, 200), transit=(1, 5))  # users whose sessions end within seconds
LEARNED_FROM: Final = 6  # seconds of event time that a version is learned from
BATCH: Final = 16 << 10  # bytes of a batch of the backlog: the default of Kafka's own producers
PATIENCE: Final = 60.0  # seconds to write a backlog

_CONTEXTS = [orjson.dumps(row) for row in np.random.default_rng(7).standard_normal((512, DIM)).round(6).tolist()]


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
    """Return a version that was learned from a few thousand users."""
    return learned_from(LearningSettings(dim=DIM, horizon=HORIZON), simulated_users(habits=QUICK))


def learned_from(settings: LearningSettings, users: Users) -> Parameters:
    """Return a version that was learned from users, in force from time 0 on; it precedes any journal."""
    quick = replace(settings, warmup=1, window=SECOND, session_timeout=2 * SECOND, lateness=SECOND // 2)
    served = Embedded(quick, users.world.catalogue())
    for second in range(LEARNED_FROM):
        due = list(users.arrivals(second))
        while due:
            for sent in due:
                served.send(f"ads.{sent.topic}", sent.value, key=sent.key, timestamp=sent.time)
            due = [answer for _, value in served.pump() for answer in users.answer(decode_decision(value), 0)]
        served.advance(users.start + (second + 1) * SECOND)
    newest = served.versions.newest
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


def arrival(session: bytes, number: int) -> bytes:
    """Return an arrival at this moment; `number` chooses its context.

    >>> orjson.loads(arrival(b"s", 3)).keys()
    dict_keys(['session_id', 'occurred_at', 'context'])
    """
    now, context = time.time_ns() // 1_000_000, _CONTEXTS[number % len(_CONTEXTS)]
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
    tps = [TopicPartition(names.decisions, number) for number in range(partitions)]
    return sum(offsets_of(admin, tps, END).values())
