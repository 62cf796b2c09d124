"""`adcascade topics`, and readers outside of any group, on the real broker."""

from __future__ import annotations

import uuid
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaException
from confluent_kafka.admin import NewTopic

from tests.kafka.conftest import OwnBroker
from tests.kafka.fleet import CommandLine, Fleet, TopicSet
from tests.programs import eventually
from worker.cli.main import main
from worker.kafka.clients import TopicReader
from worker.kafka.topics import topics_at_start, wait_for_topics


class TopicsCommand(TopicSet):
    """`adcascade topics` on topics of their own."""

    def __init__(self, address: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        super().__init__(address, f"p{uuid.uuid4().hex[:8]}", folder)
        self.command = CommandLine(self, capsys)

    def json(self, action: str, *arguments: str, code: int = 0) -> dict[str, Any]:
        found = self.command.json("topics", action, *arguments, code=code)
        return {topic["topic"].removeprefix(f"{self.names.prefix}."): topic for topic in found["topics"]}

    def make(self, name: str, partitions: int, **settings: str) -> None:
        topic = f"{self.names.prefix}.{name}"
        configs = {key.replace("_", "."): value for key, value in settings.items()}
        admin = self.admin
        admin.create_topics([NewTopic(topic, partitions, 1, config=configs)])[topic].result()
        wait_for_topics(admin, [topic])


@pytest.fixture
def topics(address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> TopicsCommand:
    return TopicsCommand(address, tmp_path, capsys)


def test_created_topics_pass_the_check(topics: TopicsCommand) -> None:
    missing = topics.json("check", code=1)
    assert {topic["state"] for topic in missing.values()} == {"missing"}
    made = topics.json("create", "--partitions", "3")
    assert {topic["state"] for topic in made.values()} == {"created"}
    many = ("arrivals", "clicks", "decisions", "sessions-changelog")
    one = ("journal", "parameters", "parameters-history", "episodes", "dead-letters")
    counts = {name: topic["partitions"] for name, topic in made.items()}
    assert counts == {**dict.fromkeys(many, 3), **dict.fromkeys(one, 1)}
    for again in (topics.json("check"), topics.json("create", "--partitions", "3")):
        assert {topic["state"] for topic in again.values()} == {"right"}


def test_check_lists_the_differences(topics: TopicsCommand) -> None:
    topics.make("arrivals", 6, message_timestamp_type="LogAppendTime", compression_type="uncompressed")
    topics.make("clicks", 5)
    topics.make("journal", 2, retention_ms="60000")
    topics.make("parameters", 1, cleanup_policy="delete")
    code, out, _ = topics.command("topics", "check")
    assert code == 1
    for line in (
        "clicks: has 5 partitions, not 6",
        "clicks: message.timestamp.type is CreateTime, not LogAppendTime",
        "clicks: compression.type is producer, not uncompressed",
        "journal: message.timestamp.type is CreateTime, not LogAppendTime",
        "journal: has 2 partitions, not 1",
        "journal: retention.ms is 60000, less than 2592000000",
        "parameters: cleanup.policy is delete, not compact",
        "parameters: max.message.bytes is 1048588, less than 16777216",
        "decisions: does not exist",
    ):
        assert f"{topics.names.prefix}.{line}" in out
    assert f"{topics.names.prefix}.arrivals: " not in out


def test_create_leaves_existing_topics_as_they_are_and_takes_their_partition_count(topics: TopicsCommand) -> None:
    topics.make("arrivals", 6, message_timestamp_type="LogAppendTime", compression_type="uncompressed")
    topics.make("parameters", 1, cleanup_policy="delete")
    made = topics.json("create", code=1)  # the parameters are different, and stay so
    assert made["arrivals"]["state"] == "right"
    assert made["clicks"] == {**made["clicks"], "state": "created", "partitions": 6}
    assert made["parameters"]["state"] == "different"
    found = topics.json("check", code=1)
    assert found["parameters"]["differences"][0] == "cleanup.policy is delete, not compact"


def test_topics_that_differ_are_named_when_a_worker_starts(
    topics: TopicsCommand, caplog: pytest.LogCaptureFixture
) -> None:
    topics.json("create", "--partitions", "3", "--journal-retention", "1h")
    assert topics_at_start(topics.connection, topics.names) == 3
    assert not caplog.records
    topics.configure(topics.names.clicks, compression_type="producer")

    def warnings() -> list[str]:
        caplog.clear()
        topics_at_start(topics.connection, topics.names)
        return caplog.messages

    (line,) = eventually(warnings, what="the setting is known")
    wanted = "compression.type is producer, not uncompressed"
    assert line == f"{topics.names.clicks}: {wanted} (adcascade topics check)"


def test_more_replicas_than_brokers_are_reported_in_one_line(topics: TopicsCommand) -> None:
    code, _, err = topics.command("topics", "create", "--replication", "7")
    assert code == 1
    assert err.count("\n") == 1
    assert "could not be created" in err


@pytest.mark.parametrize(
    "command",
    [
        ("worker", "--dim", "3", "--log-format", "text"),
        ("gateway", "--port", "0", "--log-format", "text"),
        ("traffic", "--sessions", "1"),
        ("arms", "list"),
    ],
    ids=lambda command: command[0],
)
def test_missing_topics_and_an_unreachable_broker_are_reported_in_one_line(
    address: str, capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    for at, complaint in (
        (["--broker", address, "--prefix", "nowhere"], "adcascade topics create"),
        (["--broker", "127.0.0.1:1"], "127.0.0.1:1"),
    ):
        assert main([*command, *at]) == 1
        said = capsys.readouterr().err
        assert complaint in said
        assert said.count("\n") == 1


#: Bytes of zeros that each codec packs into a batch below `max.message.bytes`. Snappy packs 21 to 1.
BOMBS = {"gzip": 70_000_000, "zstd": 70_000_000, "lz4": 70_000_000, "snappy": 20_000_000}


@pytest.mark.parametrize("codec", BOMBS)
def test_a_small_batch_that_unpacks_to_too_much_is_refused(fleet: Fleet, codec: str) -> None:
    names, bomb = fleet.names, bytes(BOMBS[codec])
    fleet.send_raw([(names.decisions, b"key", bomb)], compression=codec)  # a topic that stays compressed takes it
    for topic in (names.arrivals, names.clicks):
        with pytest.raises(KafkaException, match="MSG_SIZE_TOO_LARGE"):
            fleet.send_raw([(topic, b"key", bomb)], compression=codec)
    values = [b'{"session_id":"s-%d"}' % n for n in range(2_000)]
    fleet.send_raw([(names.arrivals, b"key", value) for value in values], compression=codec)
    assert [record.value for record in fleet.read(names.arrivals)] == values


# ── readers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_a_reader_finds_its_place_again_after_a_restart_of_the_broker(own_broker: OwnBroker, tmp_path: Path) -> None:
    with closing(Fleet(own_broker.address, "r", tmp_path)) as fleet, TopicReader(fleet.connection) as reader:
        journal = fleet.names.journal
        fleet.send_raw([(journal, None, b"%d" % n) for n in range(3)])
        assert fleet.ends(journal) == {(journal, 0): 3}
        assert [record.value for record in reader.read_to_end(journal)] == [b"0", b"1", b"2"]
        own_broker.restart("--kill")
        fleet.send_raw([(journal, None, b"3")])
        assert reader.bounds(journal) == (0, 4)
        assert fleet.ends(journal) == {(journal, 0): 4}
        assert [record.value for record in reader.read_to_end(journal, 2)] == [b"2", b"3"]


@pytest.mark.slow
def test_a_reader_passes_over_deleted_records_and_stops_where_it_is_told(fleet: Fleet) -> None:
    journal = fleet.names.journal
    fleet.send_raw([(journal, None, b"%d" % n) for n in range(6)])
    fleet.trim(journal, 2)
    with TopicReader(fleet.connection) as reader:
        assert reader.bounds(journal) == (2, 6)
        assert [record.offset for record in reader.read_to_end(journal)] == [2, 3, 4, 5]
        assert [record.offset for record in reader.read_to(journal, 3, 5)] == [3, 4]
        assert list(reader.read_to(journal, 6, 6)) == []
        assert reader.poll(0.2) == [], "nothing is read that was not asked for"
