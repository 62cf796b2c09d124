"""What the parts of the Faust app share. Faust makes them itself, so they find it as `app.link`."""

from __future__ import annotations

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
    #: Most between two heartbeats. Their answers are how a member learns of a rebalance, which waits for all members.
    #: So this is about the longest wait of an arrival. One heartbeat a second costs 0.1 % of a core.
    most_heartbeat_interval: float = 1.0
    commit_interval: float = 1.0
    #: To acknowledge everything in flight before a rebalance.
    drain_timeout: float = 8.0
    #: To end after a signal or a failure; then the process is killed.
    stop_timeout: float = 10.0
    #: Most that a fetch waits for a record. A silent worker sends so few requests; a record ends the wait at once.
    fetch_wait_ms: int = 500
    fetch_bytes: int = 1 << 20
    poll_records: int = 2048
    batch_bytes: int = 512 << 10

    @property
    def heartbeat_interval(self) -> float:
        """Seconds between two heartbeats: several of them may be lost before the session times out."""
        return min(self.most_heartbeat_interval, self.session_timeout / 3)


class Link:
    """The options, and the owner of the partitions."""

    def __init__(self, options: FaustOptions, owner: PartitionOwner) -> None:
        self.options = options
        self.owner = owner
        self.arrivals = options.topics.arrivals
        self.inputs = options.topics.inputs
        #: Topics that are assigned to a worker but not read through Faust.
        self.assigned_only = frozenset((options.topics.journal,))


def link_of(app: Any) -> Link:
    """Return the link of an app, which Faust types as its own class."""
    link: Link = app.link
    return link
