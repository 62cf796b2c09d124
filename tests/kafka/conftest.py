"""Brokers for the tests: one that all share, one that a test may restart, and one with access rules.

The shared broker is at the address in ADCASCADE_TEST_KAFKA, else deploy/kafka/broker starts it for the run. A broker or
a worker that several files use is started once.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.kafka.fleet import ROOT, Fleet
from tests.programs import lacking

BROKER = ROOT / "deploy/kafka/broker"


def broker(*arguments: str) -> str:
    """Run the broker script; without Java, Maven or the jars skip the test, or fail it where CI is set."""
    done = subprocess.run([BROKER, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        lacking(f"no Kafka broker: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout.strip()


class OwnBroker:
    """A broker that a test may stop and start."""

    def __init__(self, folder: Path) -> None:
        self.data = ("--data-dir", str(folder))
        self.address = broker("start", "--port", "0", *self.data)

    def start(self) -> None:
        broker("start", "--port", self.address.rpartition(":")[2], *self.data)

    def stop(self, *how: str) -> None:
        broker("stop", *how, *self.data)

    def restart(self, *how: str) -> None:
        self.stop(*how)
        self.start()

    def lose_disk(self) -> None:
        """Stop it, delete everything, and start it again."""
        self.stop("--kill")
        shutil.rmtree(self.data[1])
        self.start()

    def close(self) -> None:
        self.stop("--kill")


@pytest.fixture(scope="session")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a broker."""
    if given := os.environ.get("ADCASCADE_TEST_KAFKA"):
        yield given
        return
    with closing(OwnBroker(tmp_path_factory.mktemp("kafka"))) as made:
        yield made.address


@pytest.fixture(scope="session")
def _own_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnBroker]:
    with closing(OwnBroker(tmp_path_factory.mktemp("own"))) as made:
        yield made


@pytest.fixture
def own_broker(_own_broker: OwnBroker) -> OwnBroker:
    """A broker for tests that restart it; it runs when a test begins, whatever happened in the one before."""
    status = subprocess.run([BROKER, "status", *_own_broker.data], capture_output=True, check=False)
    if status.returncode:
        _own_broker.start()
    return _own_broker


@pytest.fixture
def fleet(address: str, tmp_path: Path) -> Iterator[Fleet]:
    """Topics of their own, without workers."""
    with closing(Fleet(address, f"f{uuid.uuid4().hex[:8]}", tmp_path)) as made:
        yield made


@pytest.fixture(scope="session")
def served(address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Topics with a worker that signs tokens, for tests that only send and read; contexts are of 5 numbers."""
    with closing(Fleet(address, f"s{uuid.uuid4().hex[:8]}", tmp_path_factory.mktemp("served"))) as made:
        made.serving("--dim", "5", ADCASCADE_TOKEN_SECRET="a secret of twenty-odd bytes")
        yield made
