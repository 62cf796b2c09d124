"""Fetch records and ask for offsets over two connections.

A broker answers the requests of a connection in turn, and a fetch waits for records. A request for offsets behind it
would wait as long: at every rebalance several times over. Over a connection of its own it is answered at once, so a
fetch may wait for long, and an idle process sends few requests.
"""

from __future__ import annotations

from typing import Any

from aiokafka.client import AIOKafkaClient, ConnectionGroup
from aiokafka.protocol.offset import OffsetRequest

from worker.kafka.unpacking import BoundedFetcher


class TwoConnections:
    """The client of a fetcher; requests for offsets use the connection of the group's coordinator."""

    def __init__(self, client: AIOKafkaClient) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def send(self, node_id: Any, request: Any) -> Any:
        """Send a request and return its answer; at once, if the request has it."""
        if (answer := getattr(request, "answer", None)) is not None:
            return answer
        apart = isinstance(request, OffsetRequest)
        group = ConnectionGroup.COORDINATION if apart else ConnectionGroup.DEFAULT
        return await self._client.send(node_id, request, group=group)


class TwoConnectionsFetcher(BoundedFetcher):
    """A fetcher that uses two connections."""

    def __init__(self, client: AIOKafkaClient, *arguments: Any, **named: Any) -> None:
        super().__init__(TwoConnections(client), *arguments, **named)
