"""The published parameters at a gateway, on a mock cluster."""

from __future__ import annotations

import asyncio
import threading
from contextlib import closing
from dataclasses import replace

from tests.mock_cluster import MockCluster
from tests.programs import until
from tests.stream.scenes import parameters
from worker.gateway.model import PublishedModel
from worker.stream.topology import Topics
from worker.stream.version_records import encode_parameters

TOPICS = Topics("ads")


async def test_newer_versions_are_adopted_and_older_ones_and_garbage_are_not() -> None:
    first, adopted = parameters(), list[int]()
    versions = [replace(first, version=first.version + number) for number in range(3)]
    with closing(MockCluster(TOPICS.parameters)) as brokers:
        model = PublishedModel(brokers.connection, TOPICS, lambda version: adopted.append(version.version))
        assert model.version == -1
        async with model.following():
            for value in (versions[1], b"no version", versions[0], versions[2]):
                record = value if isinstance(value, bytes) else encode_parameters(value)
                await asyncio.to_thread(brokers.write, TOPICS.parameters, [record])
            await until(lambda: model.version == versions[2].version)
    assert adopted == [versions[1].version, versions[2].version]
    assert not [thread for thread in threading.enumerate() if thread.name == "parameters"]
