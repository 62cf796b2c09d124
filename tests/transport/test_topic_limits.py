"""The largest record that the output topics take."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.transport.fake import in_loop
from worker.errors import FailedError
from worker.kafka import topics as module
from worker.kafka.connection import Connection
from worker.kafka.topics import largest_record
from worker.stream.topology import LEAST_BYTES, MOST_BYTES, Topics

NAMES = Topics("t")


def answer(monkeypatch: pytest.MonkeyPatch, limits: dict[str, int], errors: dict[str, str] | None = None) -> None:
    @asynccontextmanager
    async def admin_client(connection: Connection) -> AsyncIterator[None]:
        yield None

    async def partitions_of(admin: None, names: Collection[str]) -> dict[str, list[Any]]:
        return {name: [] for name in names if name in limits or name in (errors or {})}

    async def settings_of(admin: None, names: Collection[str]) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
        return {name: {"max.message.bytes": str(limits[name])} for name in names if name in limits}, errors or {}

    monkeypatch.setattr(module, "admin_client", admin_client)
    monkeypatch.setattr(module, "partitions_of", partitions_of)
    monkeypatch.setattr(module, "_settings_of", settings_of)


async def largest() -> int:
    return await largest_record(Connection(servers=("nowhere:1",)), NAMES)


@in_loop
async def test_the_smallest_output_topic_bounds_all_outputs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answer(monkeypatch, {NAMES.journal: 16 << 20, NAMES.decisions: 1_048_588})  # the changelog is made later
    assert await largest() == MOST_BYTES
    assert not caplog.records
    answer(monkeypatch, {NAMES.journal: 16 << 20, NAMES.changelog: 300_000, NAMES.dead_letters: 200_000})
    assert await largest() == 200_000
    assert [record.args[0] for record in caplog.records if record.args] == [NAMES.dead_letters, NAMES.changelog]


@in_loop
async def test_a_topic_that_takes_too_little_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, {NAMES.journal: LEAST_BYTES - 1})
    with pytest.raises(FailedError, match=r"^t\.journal: max\.message\.bytes is 65535, less than 65536; raise it$"):
        await largest()


@in_loop
async def test_without_the_right_to_read_settings_the_default_is_assumed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answer(monkeypatch, {}, {NAMES.journal: "not authorized"})
    assert await largest() == MOST_BYTES
    assert "not authorized" in caplog.text
