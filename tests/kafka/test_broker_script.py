"""Two brokers of deploy/kafka/broker at the same time."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.kafka.conftest import BROKER, broker


def test_brokers_run_side_by_side(address: str, tmp_path: Path) -> None:
    data = str(tmp_path / "second")
    second = broker("start", "--port", "0", "--data-dir", data)
    try:
        assert second != address
        assert second in broker("status", "--data-dir", data)
        again = subprocess.run([BROKER, "start", "--data-dir", data], capture_output=True, text=True, check=False)
        assert (again.returncode, "already running" in again.stderr) == (1, True)
    finally:
        broker("stop", "--data-dir", data)
    assert subprocess.run([BROKER, "status", "--data-dir", data], capture_output=True, check=False).returncode == 3
