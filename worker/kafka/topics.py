"""The wanted configuration of the topics: create them, check them, refuse to start on others.

Existing topics are never changed: the partition count of a topic decides which worker serves a session, and a policy
decides what is deleted. Both are the operator's to change.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic, ResourceType

from worker.errors import FailedError
from worker.kafka.clients import REQUEST_TIMEOUT, admin_client, existing_topics, readable_errors
from worker.kafka.connection import Connection, reason_of
from worker.stream.events import MOST_PARTITIONS
from worker.stream.topology import MOST_BYTES, Topics
from worker.stream.version_sizes import VERSION_BYTES

log = logging.getLogger(__name__)

HOUR = 3_600_000
DAY = 24 * HOUR
DEFAULT_RETENTION = 7 * DAY
DEFAULT_PARTITIONS = 8
MOST_REPLICAS = 3
#: Seconds until the brokers know new topics.
PATIENCE = 30.0

#: The default of brokers: 1 MiB and the overhead of a batch.
DEFAULT_BYTES = 1_048_588

# Settings of topics.
POLICY = "cleanup.policy"
RETENTION = "retention.ms"
SIZE = "max.message.bytes"
TIMESTAMPS = "message.timestamp.type"
COMPRESSION = "compression.type"

#: The broker sets the timestamps of records, so that no client and no worker can set them.
_BROKER_TIME = {TIMESTAMPS: "LogAppendTime"}
#: The broker unpacks every batch, and refuses one that is larger than its limit then: a small batch cannot fill the
#: memory of a worker.
_UNPACKED = {COMPRESSION: "uncompressed"}
_COMPACT = {POLICY: "compact", SIZE: str(VERSION_BYTES)}
#: Sessions live for minutes, and most versions of the history for an hour. Without early compaction, days of old values
#: are kept, and read in a recovery.
_COMPACT_SOON = {**_COMPACT, "segment.ms": str(HOUR), "min.cleanable.dirty.ratio": "0.2"}


def _kept_for(retention: int) -> dict[str, str]:
    return {POLICY: "delete", SIZE: str(DEFAULT_BYTES), RETENTION: str(retention)}


@dataclass(frozen=True, slots=True)
class WantedTopic:
    """The wanted configuration of a topic.

    A new topic gets all `settings`. An existing one must have the same policy, timestamps and compression, and at least
    the numbers named in `at_least`; everything else is its owner's business.
    """

    name: str
    partitions: int
    settings: Mapping[str, str]
    at_least: Sequence[str] = (SIZE,)

    def check(self, found: FoundTopic) -> None:
        """Log the differences of an existing topic; raise `FailedError` if a worker cannot serve with it."""
        if found.partitions != self.partitions:
            raise FailedError(f"{self.name} has {found.partitions} partitions, and must have {self.partitions}")
        if (size := int(found.settings.get(SIZE, MOST_BYTES))) < MOST_BYTES:
            raise FailedError(f"{self.name}: {SIZE} is {size}, less than {MOST_BYTES}; raise it")
        if found.error:
            log.warning("the settings of %s cannot be read, the right ones are assumed: %s", self.name, found.error)
            return
        for difference in self.differences(found):
            log.warning("%s: %s (adcascade topics check)", self.name, difference)

    def differences(self, found: FoundTopic) -> list[str]:
        """Return the differences of an existing topic, one line each."""
        lines = []
        if found.partitions != self.partitions:
            lines.append(f"has {found.partitions} partitions, not {self.partitions}")
        for name in (POLICY, TIMESTAMPS, COMPRESSION):
            wanted, present = self.settings.get(name), found.settings.get(name)
            if wanted not in (None, present):
                lines.append(f"{name} is {present}, not {wanted}")
        for name in self.at_least:
            least, number = int(self.settings[name]), int(found.settings.get(name, -1))
            if 0 <= number < least:  # -1: without bounds
                lines.append(f"{name} is {number}, less than {least}")
        return lines


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundTopic:
    """The configuration of an existing topic; without `settings` if they cannot be read, for the reason in `error`."""

    partitions: int
    replicas: int
    settings: Mapping[str, str]
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicLayout:
    """The requested layout. Times in milliseconds; None: as it is where the topics exist, else the default."""

    partitions: int | None = None
    replication: int | None = None
    retention: int | None = None
    journal_retention: int = 30 * DAY

    def topics(self, names: Topics, partitions: int) -> tuple[WantedTopic, ...]:
        """Return all topics, with the partition count of the inputs."""
        traffic = _kept_for(DEFAULT_RETENTION if self.retention is None else self.retention)
        checked = (SIZE,) if self.retention is None else (SIZE, RETENTION)
        inputs = {**traffic, **_BROKER_TIME, **_UNPACKED}
        long = _kept_for(self.journal_retention)
        # If it is trimmed before it is folded, that feedback is lost to the learner. Its timestamps show workers whose
        # clock is wrong.
        journal = {**long, **_BROKER_TIME, SIZE: str(VERSION_BYTES)}
        return (
            WantedTopic(names.arrivals, partitions, inputs, checked),
            WantedTopic(names.clicks, partitions, inputs, checked),
            WantedTopic(names.decisions, partitions, traffic, checked),
            WantedTopic(names.journal, 1, journal, (SIZE, RETENTION)),
            WantedTopic(names.parameters, 1, _COMPACT),
            WantedTopic(names.parameters_history, 1, _COMPACT_SOON),
            WantedTopic(names.episodes, 1, long),
            WantedTopic(names.dead_letters, 1, long),
            WantedTopic(names.changelog, partitions, _COMPACT_SOON),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The state of one topic, `created`, `right`, `different` or `missing`, and why."""

    topic: str
    state: str
    partitions: int
    replicas: int
    differences: tuple[str, ...] = ()


def check(connection: Connection, names: Topics, layout: TopicLayout, *, create: bool = False) -> list[Finding]:
    """Compare every topic with its wanted configuration, and `create` those that are missing."""
    created: dict[str, Finding] = {}
    with readable_errors(connection):
        admin = admin_client(connection)
        found = find_readable(admin, names)
        wanted = layout.topics(names, _partitions(layout, names, found))
        missing = [topic for topic in wanted if create and topic.name not in found]
        if missing:
            brokers = len(admin.list_topics(timeout=REQUEST_TIMEOUT).brokers)
            replicas = layout.replication or min(MOST_REPLICAS, brokers)
            _create(admin, new_topics(missing, replicas))
            wait_for_topics(admin, [topic.name for topic in missing])
            for topic in missing:
                made = Finding(topic=topic.name, state="created", partitions=topic.partitions, replicas=replicas)
                created[topic.name] = made
    return [created.get(topic.name) or _compare(topic, found, layout.replication) for topic in wanted]


def _partitions(layout: TopicLayout, names: Topics, found: Mapping[str, FoundTopic]) -> int:
    """Return the wanted partition count of the inputs: the requested one, else the present one."""
    if layout.partitions is not None:
        return layout.partitions
    there = (found[name].partitions for name in (names.arrivals, names.clicks) if name in found)
    return next(there, DEFAULT_PARTITIONS)


def _compare(wanted: WantedTopic, topics: Mapping[str, FoundTopic], replication: int | None) -> Finding:
    found = topics.get(wanted.name)
    if found is None:
        return Finding(topic=wanted.name, state="missing", partitions=0, replicas=0, differences=("does not exist",))
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


def find(admin: AdminClient, names: Topics) -> dict[str, FoundTopic]:
    """Return the topics that exist."""
    topics = existing_topics(admin, [topic.name for topic in TopicLayout().topics(names, 1)])
    resources = [ConfigResource(ResourceType.TOPIC, topic) for topic in topics]
    answers = admin.describe_configs(resources, request_timeout=REQUEST_TIMEOUT) if resources else {}
    found = {}
    for resource, future in answers.items():
        settings, error, partitions = dict[str, str](), "", topics[resource.name].partitions
        try:
            settings = {name: entry.value for name, entry in future.result().items()}
        except KafkaException as refusal:
            error = reason_of(refusal)
        replicas = min((len(partition.replicas) for partition in partitions.values()), default=0)
        found[resource.name] = FoundTopic(partitions=len(partitions), replicas=replicas, settings=settings, error=error)
    return found


def find_readable(admin: AdminClient, names: Topics) -> dict[str, FoundTopic]:
    """Return the topics that exist; raise `FailedError` if the settings of one cannot be read."""
    found = find(admin, names)
    for name, topic in found.items():
        if topic.error:
            raise FailedError(f"the settings of {name} cannot be read: {topic.error}")
    return found


def new_topics(topics: Sequence[WantedTopic], replicas: int) -> list[NewTopic]:
    """Return the topics as the brokers are asked for them."""
    # With a spare replica, an acknowledged write survives a broker and a broker's absence stops nothing.
    durable = {"min.insync.replicas": "2"} if replicas >= MOST_REPLICAS else {}
    return [NewTopic(topic.name, topic.partitions, replicas, config={**topic.settings, **durable}) for topic in topics]


def _create(admin: AdminClient, topics: list[NewTopic]) -> None:
    for name, future in admin.create_topics(topics, request_timeout=REQUEST_TIMEOUT).items():
        try:
            future.result()
        except KafkaException as error:
            raise FailedError(f"{name} could not be created: {reason_of(error)}") from None


def wait_for_topics(admin: AdminClient, topics: Collection[str]) -> None:
    """Wait until the brokers know new topics: a worker started right away must find them."""
    deadline = time.monotonic() + PATIENCE
    while len(existing_topics(admin, topics)) < len(topics):
        if time.monotonic() > deadline:
            raise FailedError(f"the topics are created, but not known to all brokers after {PATIENCE:g} s")
        time.sleep(0.05)


# ── at the start of a worker ─────────────────────────────────────────────────────────────────────────────────────────


def topics_at_start(connection: Connection, names: Topics) -> int:
    """Return the partition count of the inputs; log how the topics differ from what `topics create` makes.

    Raise `FailedError` if a worker cannot serve with them.
    """
    with readable_errors(connection):
        found = find(admin_client(connection), names)
    count = found[names.arrivals].partitions if names.arrivals in found else DEFAULT_PARTITIONS
    wanted = TopicLayout(journal_retention=0).topics(names, count)  # how long topics are kept is their owner's business
    if missing := [topic.name for topic in wanted if topic.name not in found]:
        raise FailedError(f"no topic {', '.join(missing)}: create them first (adcascade topics create)")
    if count > MOST_PARTITIONS:
        raise FailedError(f"{names.arrivals} has {count} partitions: adcascade supports at most {MOST_PARTITIONS}")
    for topic in wanted:
        topic.check(found[topic.name])
    return count
