"""Requests for offsets do not wait behind a fetch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from aiokafka.client import ConnectionGroup
from aiokafka.protocol.fetch import FetchRequest
from aiokafka.protocol.offset import OffsetRequest

from tests.transport.fake import in_loop
from worker.kafka.fetching import TwoConnections


@in_loop
async def test_offsets_are_asked_for_over_a_connection_of_their_own() -> None:
    sent: list[tuple[Any, Any]] = []

    async def send(node_id: int, request: Any, *, group: ConnectionGroup) -> str:
        sent.append((type(request), group))
        return "answer"

    client: Any = TwoConnections(SimpleNamespace(send=send, cluster="cluster"))  # type: ignore[arg-type]
    assert client.cluster == "cluster"
    assert await client.send(1, OffsetRequest(-1, 0, [])) == "answer"
    assert await client.send(1, FetchRequest(100, 1, 1, 0, [])) == "answer"
    assert sent == [(OffsetRequest, ConnectionGroup.COORDINATION), (FetchRequest, ConnectionGroup.DEFAULT)]
