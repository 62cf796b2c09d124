"""A broker for the tests: the address in ADCASCADE_TEST_KAFKA, else one started by deploy/kafka/broker for the run."""

from __future__ import annotations

import os
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kafka.fleet import Fleet
from tests.kafka.world import ROOT, World

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


@pytest.fixture(scope="session")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a broker."""
    given = os.environ.get("ADCASCADE_TEST_KAFKA")
    if given:
        yield given
        return
    data = tmp_path_factory.mktemp("kafka")
    yield broker("start", "--port", "0", "--data-dir", str(data))
    broker("stop", "--kill", "--data-dir", str(data))


@pytest.fixture
def fleet(address: str, tmp_path: Path) -> Iterator[Fleet]:
    """Topics of their own, without workers."""
    made = Fleet(address, f"f{uuid.uuid4().hex[:8]}", tmp_path)
    yield made
    made.close()


@pytest.fixture
def world(address: str, tmp_path: Path) -> Iterator[World]:
    """Topics of their own, without toy workers."""
    made = World(address, f"t{uuid.uuid4().hex[:8]}", tmp_path)
    yield made
    made.close()
