"""Two brokers of deploy/kafka/broker at the same time."""

from __future__ import annotations

import subprocess

from tests.kafka.conftest import BROKER, OwnBroker


def test_brokers_run_side_by_side(address: str, own_broker: OwnBroker) -> None:
    def script(action: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([BROKER, action, *own_broker.data], capture_output=True, text=True, check=False)

    assert own_broker.address != address
    assert own_broker.address in script("status").stdout
    again = script("start")
    assert (again.returncode, "already running" in again.stderr) == (1, True)
    assert (script("stop").returncode, script("status").returncode) == (0, 3)
