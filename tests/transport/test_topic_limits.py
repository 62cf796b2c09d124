"""The settings of topics that a worker checks at its start."""

from __future__ import annotations

import pytest

from worker.errors import FailedError
from worker.kafka.topics import FoundTopic, compressed_inputs, largest_record
from worker.stream.topology import LEAST_BYTES, MOST_BYTES, Topics

NAMES = Topics("t")


def found(**limits: int) -> dict[str, FoundTopic]:
    """Return topics with these limits of the size of a batch."""
    return {
        getattr(NAMES, name): FoundTopic(partitions=1, replicas=1, settings={"max.message.bytes": str(limit)})
        for name, limit in limits.items()
    }


def test_the_smallest_output_topic_bounds_all_outputs(caplog: pytest.LogCaptureFixture) -> None:
    assert largest_record(found(journal=16 << 20, decisions=1_048_588), NAMES) == MOST_BYTES, "no changelog yet"
    assert not caplog.records
    assert largest_record(found(journal=16 << 20, changelog=300_000, dead_letters=200_000), NAMES) == 200_000
    assert [record.args[0] for record in caplog.records if record.args] == [NAMES.dead_letters, NAMES.changelog]


def test_a_topic_that_takes_too_little_is_refused_in_one_line() -> None:
    with pytest.raises(FailedError, match=r"^t\.journal: max\.message\.bytes is 65535, less than 65536; raise it$"):
        largest_record(found(journal=LEAST_BYTES - 1), NAMES)


def test_without_the_right_to_read_settings_the_defaults_are_assumed() -> None:
    unreadable = FoundTopic(partitions=1, replicas=1, settings={}, error="not authorized")
    topics = dict.fromkeys((NAMES.arrivals, NAMES.clicks, NAMES.journal, NAMES.changelog), unreadable)
    assert largest_record(topics, NAMES) == MOST_BYTES
    assert compressed_inputs(topics, NAMES) == []
