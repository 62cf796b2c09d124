"""The wanted configuration of the topics: create them, check them, refuse to start on others.

Existing topics are never changed: the partition count of a topic decides which worker serves a session, and a policy
decides what is deleted. Both are the operator's to change.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic, ResourceType

from worker.errors import FailedError
from worker.kafka.clients import REQUEST_TIMEOUT, admin_client, existing_topics, readable_errors
from worker.kafka.connection import Connection, reason_of
from worker.stream.events import MOST_PARTITIONS
from worker.stream.topology import LEAST_BYTES, MOST_BYTES, Topics
from worker.stream.version_records import VERSION_BYTES

log = logging.getLogger(__name__)

HOUR = 3_600_000
DAY = 24 * HOUR
DEFAULT_RETENTION = 7 * DAY
DEFAULT_PARTITIONS = 8
MOST_REPLICAS = 3

#: The default of brokers: 1 MiB and the overhead of a batch.
DEFAULT_BYTES = 1_048_588
LARGE_BYTES = VERSION_BYTES

SIZE = "max.message.bytes"

TIMESTAMPS = "message.timestamp.type"
BROKER_TIME = "LogAppendTime"

COMPRESSION = "compression.type"
UNCOMPRESSED = "uncompressed"


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedTopic:
    """The wanted configuration of a topic.

    A new topic gets all of it. An existing one must have the same policy and at least these `message_bytes`; its
    `retention` (milliseconds) is its owner's business, unless `checked`. With `broker_time`, the broker sets the
    timestamps of records, so that no client and no worker can set them. With `uncompressed`, the broker unpacks every
    batch, and refuses one that is larger than `message_bytes` then: a small batch cannot fill the memory of a worker.
    """

    name: str
    partitions: int
    policy: str = "delete"
    retention: int = 0
    checked: bool = False
    message_bytes: int = DEFAULT_BYTES
    broker_time: bool = False
    uncompressed: bool = False
    extra: Mapping[str, str] = field(default_factory=dict)

    @property
    def settings(self) -> dict[str, str]:
        """The settings of a new topic."""
        settings = {"cleanup.policy": self.policy, SIZE: str(self.message_bytes), **self.extra}
        if self.policy == "delete":
            settings["retention.ms"] = str(self.retention)
        if self.broker_time:
            settings[TIMESTAMPS] = BROKER_TIME
        if self.uncompressed:
            settings[COMPRESSION] = UNCOMPRESSED
        return settings

    def differences(self, found: FoundTopic) -> list[str]:
        """Return the differences of an existing topic, one line each."""
        lines = []
        if found.partitions != self.partitions:
            lines.append(f"has {found.partitions} partitions, not {self.partitions}")
        if found.settings.get("cleanup.policy") != self.policy:
            lines.append(f"cleanup.policy is {found.settings.get('cleanup.policy')}, not {self.policy}")
        size = int(found.settings.get(SIZE, DEFAULT_BYTES))
        if size < self.message_bytes:
            lines.append(f"{SIZE} is {size}, less than {self.message_bytes}")
        kept = int(found.settings.get("retention.ms", -1))
        if self.checked and 0 <= kept < self.retention:
            lines.append(f"retention.ms is {kept}, less than {self.retention}")
        timestamps = found.settings.get(TIMESTAMPS)
        if self.broker_time and timestamps != BROKER_TIME:
            lines.append(f"{TIMESTAMPS} is {timestamps}, not {BROKER_TIME}")
        compression = found.settings.get(COMPRESSION)
        if self.uncompressed and compression != UNCOMPRESSED:
            lines.append(f"{COMPRESSION} is {compression}, not {UNCOMPRESSED}")
        return lines


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundTopic:
    """The configuration of an existing topic."""

    name: str
    partitions: int
    replicas: int
    settings: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicLayout:
    """The requested layout. Times in milliseconds; None: as it is where the topics exist, else the default."""

    partitions: int | None = None
    replication: int | None = None
    retention: int | None = None
    journal_retention: int = 30 * DAY

    def topics(self, names: Topics, partitions: int) -> tuple[WantedTopic, ...]:
        """Return all topics, with the partition count of the inputs."""
        traffic: dict[str, Any] = {
            "partitions": partitions,
            "retention": DEFAULT_RETENTION if self.retention is None else self.retention,
            "checked": self.retention is not None,
        }
        long: dict[str, Any] = {"partitions": 1, "retention": self.journal_retention}
        return (
            WantedTopic(name=names.arrivals, broker_time=True, uncompressed=True, **traffic),
            WantedTopic(name=names.clicks, broker_time=True, uncompressed=True, **traffic),
            WantedTopic(name=names.decisions, **traffic),
            # If it is trimmed before it is folded, that feedback is lost to the learner. Its timestamps show workers
            # whose clock is wrong.
            WantedTopic(name=names.journal, message_bytes=LARGE_BYTES, checked=True, broker_time=True, **long),
            WantedTopic(name=names.parameters, partitions=1, policy="compact", message_bytes=LARGE_BYTES),
            WantedTopic(
                name=names.parameters_history,
                partitions=1,
                policy="compact",
                message_bytes=LARGE_BYTES,
                # Every version is written, and most are deleted after an hour. Without early compaction all stay.
                extra={"segment.ms": str(HOUR), "min.cleanable.dirty.ratio": "0.2"},
            ),
            WantedTopic(name=names.episodes, **long),
            WantedTopic(name=names.dead_letters, **long),
            WantedTopic(
                name=names.changelog,
                partitions=partitions,
                policy="compact",
                message_bytes=LARGE_BYTES,
                # A session lives for minutes. Without early compaction a recovery reads days of old values.
                extra={"segment.ms": str(HOUR), "min.cleanable.dirty.ratio": "0.2"},
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The state of one topic, `created`, `right`, `different` or `missing`, and why."""

    topic: str
    state: str
    partitions: int
    replicas: int
    differences: tuple[str, ...] = ()


def create(connection: Connection, names: Topics, layout: TopicLayout) -> list[Finding]:
    """Create the missing topics; compare the others."""
    with readable_errors(connection):
        admin = admin_client(connection)
        found = _find(admin, names)
        wanted = layout.topics(names, _partitions(layout, names, found))
        missing = [topic for topic in wanted if topic.name not in found]
        replicas = layout.replication or min(MOST_REPLICAS, len(admin.list_topics(timeout=REQUEST_TIMEOUT).brokers))
        if missing:
            _create(admin, new_topics(missing, replicas))
            wait_for_topics(admin, [topic.name for topic in missing])
    created = {topic.name for topic in missing}
    return [
        Finding(topic=topic.name, state="created", partitions=topic.partitions, replicas=replicas)
        if topic.name in created
        else _compare(topic, found[topic.name], layout.replication)
        for topic in wanted
    ]


def check(connection: Connection, names: Topics, layout: TopicLayout) -> list[Finding]:
    """Compare every topic with its wanted configuration."""
    with readable_errors(connection):
        found = _find(admin_client(connection), names)
    return [
        _compare(topic, found[topic.name], layout.replication)
        if topic.name in found
        else Finding(topic=topic.name, state="missing", partitions=0, replicas=0, differences=("does not exist",))
        for topic in layout.topics(names, _partitions(layout, names, found))
    ]


def _partitions(layout: TopicLayout, names: Topics, found: Mapping[str, FoundTopic]) -> int:
    """Return the wanted partition count of the inputs: the requested one, else the present one."""
    if layout.partitions is not None:
        return layout.partitions
    there = (found[name].partitions for name in (names.arrivals, names.clicks) if name in found)
    return next(there, DEFAULT_PARTITIONS)


def _compare(wanted: WantedTopic, found: FoundTopic, replication: int | None) -> Finding:
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


def _find(admin: AdminClient, names: Topics) -> dict[str, FoundTopic]:
    topics = existing_topics(admin, [topic.name for topic in TopicLayout().topics(names, 1)])
    settings, errors = settings_of(admin, topics)
    for name, error in errors.items():
        raise FailedError(f"the settings of {name} cannot be read: {error}")
    return {
        name: FoundTopic(
            name=name,
            partitions=len(topic.partitions),
            replicas=min((len(partition.replicas) for partition in topic.partitions.values()), default=0),
            settings=settings[name],
        )
        for name, topic in topics.items()
    }


def settings_of(admin: AdminClient, topics: Collection[str]) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """Return the settings of topics, and, for those that cannot be read, why."""
    settings: dict[str, dict[str, str]] = {}
    errors: dict[str, str] = {}
    resources = [ConfigResource(ResourceType.TOPIC, topic) for topic in topics]
    answers = admin.describe_configs(resources, request_timeout=REQUEST_TIMEOUT) if resources else {}
    for resource, future in answers.items():
        try:
            settings[resource.name] = {name: entry.value for name, entry in future.result().items()}
        except KafkaException as error:
            errors[resource.name] = reason_of(error)
    return settings, errors


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


def wait_for_topics(admin: AdminClient, topics: Collection[str], *, seconds: float = 30.0) -> None:
    """Wait until the brokers know new topics: a worker started right away must find them."""
    deadline = time.monotonic() + seconds
    while len(existing_topics(admin, topics)) < len(topics):
        if time.monotonic() > deadline:
            raise FailedError(f"the topics are created, but not known to all brokers after {seconds:g} s")
        time.sleep(0.05)


# ── at the start of a worker ─────────────────────────────────────────────────────────────────────────────────────────


def input_partitions(connection: Connection, names: Topics) -> int:
    """Return the partition count of the inputs; raise `FailedError` if a topic is missing or has a wrong count."""
    wanted = {topic.name: topic for topic in TopicLayout().topics(names, 0)}
    with readable_errors(connection):
        topics = existing_topics(admin_client(connection), wanted)
    counts = {name: len(topic.partitions) for name, topic in topics.items()}
    # Faust creates the changelog if it is missing.
    missing = [name for name in wanted if name not in counts and name != names.changelog]
    if missing:
        raise FailedError(f"no topic {', '.join(missing)}: create them first (adcascade topics create)")
    count = counts[names.arrivals]
    for name in (names.clicks, names.decisions, names.changelog):
        if counts.get(name, count) != count:
            raise FailedError(
                f"{name} has {counts[name]} partitions and {names.arrivals} has {count}: the counts must be equal"
            )
    if count > MOST_PARTITIONS:
        raise FailedError(f"{names.arrivals} has {count} partitions: adcascade supports at most {MOST_PARTITIONS}")
    for name in (names.journal, names.parameters, names.parameters_history):
        if counts[name] != 1:
            raise FailedError(f"{name} has {counts[name]} partitions: it must have one, for a total order")
    return count


def compressed_inputs(connection: Connection, names: Topics) -> list[str]:
    """Return a warning for each input topic whose broker does not bound what a batch unpacks to."""
    inputs = (names.arrivals, names.clicks)
    return [
        f"{name}: {COMPRESSION} is {compression}: set it to {UNCOMPRESSED}, so that the broker refuses a small batch "
        "that unpacks to more than the memory of a worker (adcascade topics check)"
        for name, compression in _read_setting(connection, inputs, COMPRESSION, UNCOMPRESSED).items()
        if compression != UNCOMPRESSED
    ]


def largest_record(connection: Connection, names: Topics) -> int:
    """Return the bytes of the largest record, or batch, that every output topic takes; at most `MOST_BYTES`.

    Raise `FailedError` if that is less than a worker needs.
    """
    outputs = (names.journal, names.dead_letters, names.changelog, names.decisions)
    sizes = _largest(connection, outputs, DEFAULT_BYTES)
    for name, size in sizes.items():
        if size < LEAST_BYTES:
            raise FailedError(f"{name}: {SIZE} is {size}, less than {LEAST_BYTES}; raise it")
        if size < MOST_BYTES:
            log.warning("%s: %s is %d; larger outputs become dead letters of their input", name, SIZE, size)
    return min([MOST_BYTES, *sizes.values()])


def largest_version(connection: Connection, names: Topics) -> int:
    """Return the bytes of the largest version that the parameters topic takes; at most `VERSION_BYTES`."""
    size = _largest(connection, (names.parameters,), VERSION_BYTES).get(names.parameters, VERSION_BYTES)
    if size < VERSION_BYTES:
        log.warning(
            "%s: %s is %d; a version that is larger cannot be published. Set it to %d",
            *(names.parameters, SIZE, size, VERSION_BYTES),
        )
    return min(VERSION_BYTES, size)


def _largest(connection: Connection, topics: Sequence[str], default: int) -> dict[str, int]:
    return {name: int(text) for name, text in _read_setting(connection, topics, SIZE, str(default)).items()}


def _read_setting(connection: Connection, topics: Sequence[str], setting: str, default: str) -> dict[str, str]:
    """Return a setting of the topics that exist and can be read; log a warning for the others."""
    with readable_errors(connection):
        admin = admin_client(connection)
        settings, errors = settings_of(admin, existing_topics(admin, topics))
    for name, error in errors.items():
        log.warning("%s of %s cannot be read, %s is assumed: %s", setting, name, default, error)
    return {name: values.get(setting, default) for name, values in settings.items()}
