"""The settings of a worker and of its learner process, apart from Faust, which the learner process does not need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from worker.kafka.connection import Connection
from worker.runtime.settings import ProcessSettings
from worker.stream.topology import Topics

#: Most seconds between two heartbeats, by which a member learns of a rebalance: about the longest wait of an arrival.
_HEARTBEATS: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings(ProcessSettings):
    """The settings of a worker; times are in seconds."""

    connection: Connection
    topics: Topics
    group: str = "adcascade"
    member_timeout: float = 10.0
    web_host: str = "127.0.0.1"
    web_port: int = 0

    def of_consumer(self) -> dict[str, Any]:
        """Return the configuration of the consumer in the group."""
        session = int(1000 * self.member_timeout)
        return self.connection.configuration(
            group_id=self.group,
            session_timeout_ms=session,
            heartbeat_interval_ms=min(int(1000 * _HEARTBEATS), session // 3),
            max_poll_interval_ms=max(300_000, session),
            # Partitions with one number of all inputs and of the changelog go to one worker.
            partition_assignment_strategy="range",
            enable_auto_commit=False,
            auto_offset_reset="error",
            enable_partition_eof=True,
            isolation_level="read_committed",
            fetch_wait_max_ms=500,
            fetch_message_max_bytes=1 << 20,
            # Bounds the memory of what was fetched and not polled.
            queued_max_messages_kbytes=64 << 10,
        )
