"""The topics as they have to be: what is wanted, what is there, and what differs.

Nothing that exists is ever changed: the partition count of a topic decides which worker sees a session, and a policy
decides what is deleted. Both are the operator's to change.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import for_code

from worker.errors import FailedError
from worker.kafka.clients import admin_client, partitions_of
from worker.kafka.connection import Connection
from worker.stream.topology import Topics

HOUR = 3_600_000
DAY = 24 * HOUR
DEFAULT_RETENTION = 7 * DAY
DEFAULT_PARTITIONS = 8
MOST_REPLICAS = 3

#: What a broker accepts if nothing is said: 1 MiB and the overhead of a batch.
USUAL_BYTES = 1_048_588
LARGE_BYTES = 16 << 20
# A record packed with others can be larger than the batch that brought it; as a dead letter it stands alone, unpacked.
DEAD_LETTER_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A topic as it has to be.

    It is created with all of this. One that exists must have the same policy and at least these `message_bytes`; how
    long it is kept (`retention`, milliseconds) is its owner's business, unless that is `checked`.
    """

    name: str
    partitions: int
    policy: str = "delete"
    retention: int = 0
    checked: bool = False
    message_bytes: int = USUAL_BYTES
    extra: Mapping[str, str] = field(default_factory=dict)

    @property
    def settings(self) -> dict[str, str]:
        """The settings to create it with."""
        settings = {"cleanup.policy": self.policy, "max.message.bytes": str(self.message_bytes), **self.extra}
        if self.policy == "delete":
            settings["retention.ms"] = str(self.retention)
        return settings

    def differences(self, found: Found) -> list[str]:
        """Say in what an existing topic is not as it has to be."""
        told = []
        if found.partitions != self.partitions:
            told.append(f"has {found.partitions} partitions, not {self.partitions}")
        if found.settings.get("cleanup.policy") != self.policy:
            told.append(f"cleanup.policy is {found.settings.get('cleanup.policy')}, not {self.policy}")
        size = int(found.settings.get("max.message.bytes", USUAL_BYTES))
        if size < self.message_bytes:
            told.append(f"max.message.bytes is {size}, less than {self.message_bytes}")
        kept = int(found.settings.get("retention.ms", -1))
        if self.checked and 0 <= kept < self.retention:
            told.append(f"retention.ms is {kept}, less than {self.retention}")
        return told


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A topic as it is."""

    name: str
    partitions: int
    replicas: int
    settings: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicLayout:
    """What was asked for. Times in milliseconds; None leaves the choice to what is there, or to the defaults."""

    partitions: int | None = None
    replication: int | None = None
    retention: int | None = None
    journal_retention: int = 30 * DAY

    def topics(self, names: Topics, partitions: int) -> tuple[Wanted, ...]:
        """Return all topics, with so many partitions of the inputs."""
        traffic: dict[str, Any] = {
            "partitions": partitions,
            "retention": DEFAULT_RETENTION if self.retention is None else self.retention,
            "checked": self.retention is not None,
        }
        long: dict[str, Any] = {"partitions": 1, "retention": self.journal_retention}
        return (
            Wanted(name=names.arrivals, **traffic),
            Wanted(name=names.clicks, **traffic),
            Wanted(name=names.decisions, **traffic),
            # Trimmed before it was folded, it takes what was not learned with it.
            Wanted(name=names.journal, message_bytes=LARGE_BYTES, checked=True, **long),
            Wanted(name=names.parameters, partitions=1, policy="compact", message_bytes=LARGE_BYTES),
            Wanted(name=names.episodes, **long),
            Wanted(name=names.dead_letters, message_bytes=DEAD_LETTER_BYTES, **long),
            Wanted(
                name=names.changelog,
                partitions=partitions,
                policy="compact",
                message_bytes=LARGE_BYTES,
                # A session lives for minutes. Old values have to go soon, or a recovery reads days of them.
                extra={"segment.ms": str(HOUR), "min.cleanable.dirty.ratio": "0.2"},
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What became of one topic: `created`, `right`, `different` or `missing`, and why."""

    topic: str
    state: str
    partitions: int
    replicas: int
    differences: tuple[str, ...] = ()


async def create(connection: Connection, names: Topics, plan: TopicLayout) -> list[Finding]:
    """Create what is missing; say of the rest how it is."""
    async with admin_client(connection) as admin:
        found = await _find(admin, names)
        wanted = plan.topics(names, _partitions(plan, names, found))
        missing = [topic for topic in wanted if topic.name not in found]
        replicas = plan.replication or min(MOST_REPLICAS, len((await admin.describe_cluster())["brokers"]))
        if missing:
            await _create(admin, missing, replicas)
            await known(admin, [topic.name for topic in missing])
        created = {topic.name for topic in missing}
        return [
            Finding(topic=topic.name, state="created", partitions=topic.partitions, replicas=replicas)
            if topic.name in created
            else _compare(topic, found[topic.name], plan.replication)
            for topic in wanted
        ]


async def check(connection: Connection, names: Topics, plan: TopicLayout) -> list[Finding]:
    """Say of every topic whether it is as it has to be."""
    async with admin_client(connection) as admin:
        found = await _find(admin, names)
    return [
        _compare(topic, found[topic.name], plan.replication)
        if topic.name in found
        else Finding(topic=topic.name, state="missing", partitions=0, replicas=0, differences=("does not exist",))
        for topic in plan.topics(names, _partitions(plan, names, found))
    ]


def _partitions(plan: TopicLayout, names: Topics, found: Mapping[str, Found]) -> int:
    """Return how many partitions the inputs have to have: as asked for, else as they have already."""
    if plan.partitions is not None:
        return plan.partitions
    there = (found[name].partitions for name in (names.arrivals, names.clicks) if name in found)
    return next(there, DEFAULT_PARTITIONS)


def _compare(wanted: Wanted, found: Found, replication: int | None) -> Finding:
    differences = wanted.differences(found)
    if replication is not None and found.replicas != replication:
        differences.append(f"has {found.replicas} replicas, not {replication}")
    return Finding(
        topic=wanted.name,
        state="different" if differences else "right",
        partitions=found.partitions,
        replicas=found.replicas,
        differences=tuple(differences),
    )


async def _find(admin: AIOKafkaAdminClient, names: Topics) -> dict[str, Found]:
    topics = [topic.name for topic in TopicLayout().topics(names, 1)]
    partitions = await partitions_of(admin, topics)
    if not partitions:
        return {}
    answers = await admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, topic) for topic in partitions])
    settings = {}
    for answer in answers:
        for code, message, _, name, entries in answer.resources:
            if code:
                raise FailedError(f"the settings of {name} cannot be read: {message or for_code(code).__name__}")
            settings[name] = {entry[0]: entry[1] for entry in entries}
    return {
        name: Found(
            name=name,
            partitions=len(parts),
            replicas=min((len(part["replicas"]) for part in parts), default=0),
            settings=settings[name],
        )
        for name, parts in partitions.items()
    }


async def _create(admin: AIOKafkaAdminClient, topics: Iterable[Wanted], replicas: int) -> None:
    # With a spare replica, an acknowledged write survives a broker and a broker's absence stops nothing.
    durable = {"min.insync.replicas": "2"} if replicas >= MOST_REPLICAS else {}
    answer = await admin.create_topics(
        [
            NewTopic(topic.name, topic.partitions, replicas, topic_configs={**topic.settings, **durable})
            for topic in topics
        ]
    )
    for name, code, *message in answer.topic_errors:
        if code:
            reason = (message and message[0]) or for_code(code).__name__
            raise FailedError(f"{name} could not be created: {reason}")


async def known(admin: AIOKafkaAdminClient, topics: Sequence[str], *, patience: float = 10.0) -> None:
    """Wait until new topics are known to the brokers: a worker started right away must find them."""
    try:
        async with asyncio.timeout(patience):
            while len(await partitions_of(admin, topics)) < len(topics):  # noqa: ASYNC110 (nobody sets an event)
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise FailedError(f"the topics are created, but not known to all brokers after {patience:g} s") from None
