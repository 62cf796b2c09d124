"""The published parameters at a gateway, on a mock cluster."""

from __future__ import annotations

import asyncio
import threading
from contextlib import closing
from dataclasses import replace

from tests.mock_cluster import MockCluster
from tests.stream.scenes import parameters
from worker.gateway.model import PublishedModel
from worker.stream.topology import Topics
from worker.stream.version_records import encode_parameters

TOPICS = Topics("ads")


def test_newer_versions_are_adopted_and_older_ones_and_garbage_are_not() -> None:
    first = parameters()
    versions = [replace(first, version=first.version + number) for number in range(3)]
    adopted: list[int] = []

    async def run(brokers: MockCluster) -> None:
        model = PublishedModel(brokers.connection, TOPICS, lambda version: adopted.append(version.version))
        assert model.version == -1
        async with asyncio.timeout(300), model.following():
            for value in (versions[1], b"no version", versions[0], versions[2]):
                record = value if isinstance(value, bytes) else encode_parameters(value)
                await asyncio.to_thread(brokers.write, TOPICS.parameters, [record])
            while model.version < versions[2].version:  # noqa: ASYNC110 - the test has a deadline
                await asyncio.sleep(0.01)

    with closing(MockCluster(TOPICS.parameters)) as brokers:
        asyncio.run(run(brokers))
    assert adopted == [versions[1].version, versions[2].version]
    assert not [thread for thread in threading.enumerate() if thread.name == "parameters"]
