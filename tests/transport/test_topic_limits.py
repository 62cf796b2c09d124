"""The largest record that the output topics take."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from worker.errors import FailedError
from worker.kafka import topics as module
from worker.kafka.connection import Connection
from worker.kafka.topics import compressed_inputs, largest_record
from worker.stream.topology import LEAST_BYTES, MOST_BYTES, Topics

NAMES = Topics("t")
CONNECTION = Connection(servers=("nowhere:1",))


def answer(monkeypatch: pytest.MonkeyPatch, limits: dict[str, int], errors: dict[str, str] | None = None) -> None:
    def settings_of(admin: object, names: Collection[str]) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
        return {name: {"max.message.bytes": str(limits[name])} for name in names if name in limits}, errors or {}

    monkeypatch.setattr(module, "admin_client", lambda connection: None)
    monkeypatch.setattr(module, "existing_topics", lambda admin, names: names)
    monkeypatch.setattr(module, "settings_of", settings_of)


def test_the_smallest_output_topic_bounds_all_outputs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answer(monkeypatch, {NAMES.journal: 16 << 20, NAMES.decisions: 1_048_588})  # the changelog is made later
    assert largest_record(CONNECTION, NAMES) == MOST_BYTES
    assert not caplog.records
    answer(monkeypatch, {NAMES.journal: 16 << 20, NAMES.changelog: 300_000, NAMES.dead_letters: 200_000})
    assert largest_record(CONNECTION, NAMES) == 200_000
    assert [record.args[0] for record in caplog.records if record.args] == [NAMES.dead_letters, NAMES.changelog]


def test_a_topic_that_takes_too_little_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, {NAMES.journal: LEAST_BYTES - 1})
    with pytest.raises(FailedError, match=r"^t\.journal: max\.message\.bytes is 65535, less than 65536; raise it$"):
        largest_record(CONNECTION, NAMES)


def test_without_the_right_to_read_settings_the_default_is_assumed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answer(monkeypatch, {}, {NAMES.journal: "not authorized"})
    assert largest_record(CONNECTION, NAMES) == MOST_BYTES
    assert compressed_inputs(CONNECTION, NAMES) == []
    assert "not authorized" in caplog.text
