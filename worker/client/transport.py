"""The seam between the rules of a client and Kafka: a `ClientTransport` sends records and hands over decisions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol, TypeAlias

from worker.errors import FailedError
from worker.stream.topology import Record

#: The topics that clients write to, without the prefix.
Input: TypeAlias = Literal["arrivals", "clicks"]

#: Called with the decisions of every poll.
Receive: TypeAlias = Callable[[Sequence[Record]], None]


class UndeliveredError(FailedError):
    """The brokers did not accept a record within the time for delivery."""


class Keyed(NamedTuple):
    """A record for an input topic; without a partition it goes to that of its key."""

    topic: Input
    key: bytes
    value: bytes
    partition: int | None = None


class ClientTransport(Protocol):
    """Moves records to and from the workers."""

    @property
    def partitions(self) -> int:
        """The number of partitions over which new sessions are spread."""

    @property
    def trouble(self) -> str | None:
        """Why no records can be exchanged at present; None if they can."""

    async def start(self, receive: Receive) -> None:
        """Connect; from the return on, `receive` is called with every new decision. Raises `FailedError`."""

    def send(self, record: Keyed) -> asyncio.Future[None]:
        """Send a record immediately; the future resolves when all replicas have it, or raises `UndeliveredError`."""

    async def stop(self) -> None:
        """Wait until everything sent is delivered or given up, and disconnect."""
