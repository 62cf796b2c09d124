"""A broker for the tests: the address in ADCASCADE_TEST_KAFKA, else one started by deploy/kafka/broker for the run."""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.kafka.fleet import Fleet
from tests.kafka.world import ROOT

BROKER = ROOT / "deploy/kafka/broker"


def broker(*arguments: str) -> str:
    """Run the broker script; without Java, Maven or the jars skip the test, or fail it where CI is set."""
    done = subprocess.run([BROKER, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        reason = f"no Kafka broker: {done.stderr.strip() or done.stdout.strip()}"
        if os.environ.get("CI", "").lower() in ("1", "true"):
            pytest.fail(reason)
        pytest.skip(reason)
    return done.stdout.strip()


class OwnBroker:
    """A broker that a test may restart."""

    def __init__(self, folder: Path) -> None:
        self.data = ("--data-dir", str(folder))
        self.address = broker("start", "--port", "0", *self.data)

    def restart(self, *how: str) -> None:
        broker("stop", *how, *self.data)
        broker("start", "--port", self.address.rpartition(":")[2], *self.data)

    def lose_disk(self) -> None:
        """Stop it, delete everything, and start it again."""
        broker("stop", "--kill", *self.data)
        shutil.rmtree(self.data[1])
        broker("start", "--port", self.address.rpartition(":")[2], *self.data)

    def close(self) -> None:
        broker("stop", "--kill", *self.data)


@pytest.fixture(scope="session")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a broker."""
    if given := os.environ.get("ADCASCADE_TEST_KAFKA"):
        yield given
        return
    with closing(OwnBroker(tmp_path_factory.mktemp("kafka"))) as made:
        yield made.address


@pytest.fixture
def own_broker(tmp_path: Path) -> Iterator[OwnBroker]:
    with closing(OwnBroker(tmp_path / "broker")) as made:
        yield made


@pytest.fixture
def fleet(address: str, tmp_path: Path) -> Iterator[Fleet]:
    """Topics of their own, without workers."""
    with closing(Fleet(address, f"f{uuid.uuid4().hex[:8]}", tmp_path)) as made:
        yield made
