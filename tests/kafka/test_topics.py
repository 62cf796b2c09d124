"""`adcascade topics` on the real broker."""

from __future__ import annotations

import asyncio
import json
import uuid
from typing import Any

import pytest
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from worker.cli.main import main
from worker.kafka.topics import wait_for_topics


class Broker:
    """The command line on topics of their own."""

    def __init__(self, address: str, capsys: pytest.CaptureFixture[str]) -> None:
        self.prefix = f"p{uuid.uuid4().hex[:8]}"
        self.address = address
        self._capsys = capsys

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        code = main(["topics", *arguments, "--broker", self.address, "--prefix", self.prefix])
        captured = self._capsys.readouterr()
        return code, captured.out, captured.err

    def json(self, *arguments: str) -> tuple[int, dict[str, Any]]:
        code, out, _ = self(*arguments, "--json", "-")
        return code, {topic["topic"].removeprefix(f"{self.prefix}."): topic for topic in json.loads(out)["topics"]}

    def make(self, name: str, partitions: int, **settings: str) -> None:
        async def create() -> None:
            admin = AIOKafkaAdminClient(bootstrap_servers=self.address)
            await admin.start()
            try:
                configs = {key.replace("_", "."): value for key, value in settings.items()}
                topic = f"{self.prefix}.{name}"
                await admin.create_topics([NewTopic(topic, partitions, 1, topic_configs=configs)])
                await wait_for_topics(admin, [topic])
            finally:
                await admin.close()

        asyncio.run(create())


@pytest.fixture
def topics(address: str, capsys: pytest.CaptureFixture[str]) -> Broker:
    return Broker(address, capsys)


def test_what_create_makes_is_what_check_wants(topics: Broker) -> None:
    code, missing = topics.json("check")
    assert code == 1
    assert {topic["state"] for topic in missing.values()} == {"missing"}
    code, made = topics.json("create", "--partitions", "3")
    assert (code, {topic["state"] for topic in made.values()}) == (0, {"created"})
    assert {name: topic["partitions"] for name, topic in made.items()} == {
        "arrivals": 3,
        "clicks": 3,
        "decisions": 3,
        "sessions-changelog": 3,
        "journal": 1,
        "parameters": 1,
        "episodes": 1,
        "dead-letters": 1,
    }
    code, found = topics.json("check")
    assert (code, {topic["state"] for topic in found.values()}) == (0, {"right"})
    code, found = topics.json("create", "--partitions", "3")
    assert (code, {topic["state"] for topic in found.values()}) == (0, {"right"})


def test_check_says_exactly_what_differs(topics: Broker) -> None:
    topics.make("arrivals", 6)
    topics.make("clicks", 5)
    topics.make("journal", 2, retention_ms="60000")
    topics.make("parameters", 1, cleanup_policy="delete")
    code, out, _ = topics("check")
    assert code == 1
    for line in (
        "clicks: has 5 partitions, not 6",
        "journal: has 2 partitions, not 1",
        "journal: retention.ms is 60000, less than 2592000000",
        "parameters: cleanup.policy is delete, not compact",
        "parameters: max.message.bytes is 1048588, less than 16777216",
        "decisions: does not exist",
    ):
        assert f"{topics.prefix}.{line}" in out
    assert f"{topics.prefix}.arrivals: " not in out


def test_create_leaves_alone_what_exists_and_takes_its_partition_count(topics: Broker) -> None:
    topics.make("arrivals", 6)
    topics.make("parameters", 1, cleanup_policy="delete")
    code, made = topics.json("create")
    assert code == 1, "the parameters are not as they must be, and stay so"
    assert made["arrivals"]["state"] == "right"
    assert made["clicks"] == {**made["clicks"], "state": "created", "partitions": 6}
    assert made["parameters"]["state"] == "different"
    _, found = topics.json("check")
    assert found["parameters"]["differences"][0] == "cleanup.policy is delete, not compact"


def test_more_replicas_than_brokers_are_told_in_one_line(topics: Broker) -> None:
    code, _, err = topics("create", "--replication", "7")
    assert code == 1
    assert err.count("\n") == 1
    assert "could not be created" in err


def test_a_broker_that_cannot_be_reached_is_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topics", "check", "--broker", "127.0.0.1:1"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("adcascade: cannot use Kafka at 127.0.0.1:1: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("command", [("worker", "--dim", "3"), ("arms", "list")])
def test_missing_topics_are_told_with_what_creates_them(
    address: str, capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    assert main([*command, "--broker", address, "--prefix", "nowhere"]) == 1
    assert "adcascade topics create" in capsys.readouterr().err
