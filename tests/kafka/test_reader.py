"""Readers outside of any group, and the script that starts brokers."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from tests.kafka.conftest import OwnBroker
from tests.kafka.fleet import Fleet
from worker.kafka.clients import TopicReader

pytestmark = pytest.mark.slow


def test_a_reader_finds_its_place_again_after_a_restart_of_the_broker(own_broker: OwnBroker, tmp_path: Path) -> None:
    with closing(Fleet(own_broker.address, "r", tmp_path)) as fleet, TopicReader(fleet.connection) as reader:
        journal = fleet.names.journal
        fleet.send_raw([(journal, None, b"%d" % n) for n in range(3)])
        assert fleet.ends(journal) == {(journal, 0): 3}
        assert [record.value for record in reader.read_to_end(journal)] == [b"0", b"1", b"2"]
        own_broker.restart("--kill")
        fleet.send_raw([(journal, None, b"3")])
        assert reader.bounds(journal) == (0, 4)
        assert fleet.ends(journal) == {(journal, 0): 4}
        assert [record.value for record in reader.read_to_end(journal, 2)] == [b"2", b"3"]


def test_a_reader_passes_over_deleted_records_and_stops_where_it_is_told(fleet: Fleet) -> None:
    journal = fleet.names.journal
    fleet.send_raw([(journal, None, b"%d" % n) for n in range(6)])
    fleet.trim(journal, 2)
    with TopicReader(fleet.connection) as reader:
        assert reader.bounds(journal) == (2, 6)
        assert [record.offset for record in reader.read_to_end(journal)] == [2, 3, 4, 5]
        assert [record.offset for record in reader.read_to(journal, 3, 5)] == [3, 4]
        assert list(reader.read_to(journal, 6, 6)) == []
        assert reader.poll(0.2) == [], "nothing is read that was not asked for"
