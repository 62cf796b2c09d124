"""What the parts of the Faust app share. Faust makes them itself, so they find it as `app.link`."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from worker.kafka.connection import Connection
from worker.kafka.transport import PartitionOwner
from worker.stream.topology import Topics


@dataclass(frozen=True, slots=True, kw_only=True)
class FaustOptions:
    """Options of the transport. The defaults are for a worker with its own core; times are in seconds."""

    connection: Connection
    topics: Topics = field(default_factory=Topics)
    group: str = "adcascade"
    #: Replicas of the changelog, if Faust has to create it.
    replication: int = 1
    session_timeout: float = 10.0
    commit_interval: float = 1.0
    #: To acknowledge everything in flight before a rebalance.
    drain_timeout: float = 8.0
    #: To end after a signal or a failure; then the process is killed.
    stop_timeout: float = 10.0
    #: Between two polls.
    poll_pause: float = 0.006
    #: For a second fetch, when a poll finds records that have waited.
    second_fetch_timeout: float = 0.004
    fetch_wait_ms: int = 100
    fetch_bytes: int = 1 << 20
    poll_records: int = 2048
    batch_bytes: int = 512 << 10


class Link:
    """The options, the owner of the partitions, and whether the records of the last poll are handled."""

    def __init__(self, options: FaustOptions, owner: PartitionOwner) -> None:
        self.options = options
        self.owner = owner
        self.arrivals = options.topics.arrivals
        self.inputs = options.topics.inputs
        #: Topics that are assigned to a worker but not read through Faust.
        self.assigned_only = frozenset((options.topics.journal,))
        self._handled = asyncio.Event()
        self._handled.set()

    def offer(self) -> None:
        """Note that records are on their way to the agent."""
        self._handled.clear()

    def mark_handled(self) -> None:
        """Note that the records have been handled, or were lost in a rebalance."""
        self._handled.set()

    async def handled(self, timeout: float) -> None:  # noqa: ASYNC109 (running out of time is no error)
        """Wait until the offered records are handled and there is room for more.

        Reading ahead would hold records back unanswered, and leave younger ones for later.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._handled.wait()

    def close(self) -> None:
        """Take no more records: the partitions are about to be revoked."""
        self.owner.close()
        self.mark_handled()


def link_of(app: Any) -> Link:
    """Return the link of an app, which Faust types as its own class."""
    link: Link = app.link
    return link
