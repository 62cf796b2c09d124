"""The thinned history: whatever the schedule of versions, compaction leaves what was promised."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.stream.history import HOUR, WEEK_HOURS, KeptVersion, changes, not_kept, slot_of, tag_slot, tags
from worker.stream.parameters import Parameters
from worker.stream.settings import Arm, LearningSettings
from worker.stream.versions import KEPT

FIRST = Parameters.first(LearningSettings(dim=1), (Arm(arm="a", reward=1.0),))
START = 1_700_000_000_000


class Compacted:
    """A compacted topic: the newest record of every key."""

    def __init__(self) -> None:
        self.records: dict[str, Parameters] = {}

    @property
    def held(self) -> dict[str, KeptVersion]:
        return {slot: KeptVersion(one.version, one.made_at) for slot, one in self.records.items()}

    def write(self, slots: dict[str, Parameters], gone: Iterable[str] = ()) -> None:
        self.records |= slots
        for slot in gone:
            del self.records[slot]


def schedule(gaps: Sequence[int], start: int = START) -> list[Parameters]:
    """Return versions with these times between them; a start of 0: made before any progress."""
    made_at, versions = start, []
    for number, gap in enumerate(gaps):
        made_at = made_at + gap if made_at or not gap else START
        versions.append(replace(FIRST, version=number, made_at=made_at, folds=number))
    return versions


#: Orders one after the other, short windows, long ones, an idle night, an idle fortnight.
gaps = st.lists(
    st.sampled_from([0, 0, 1, 1_000, 60_000, 61_000, 10 * 60_000, HOUR - 1, HOUR, 7 * HOUR, 400 * HOUR]),
    min_size=1,
    max_size=120,
)


def check_promise(topic: Compacted, made: Sequence[Parameters], tagged: dict[str, int]) -> None:
    now = made[-1].made_at
    kept = {one.version for one in topic.records.values()}
    recent = {one.version for one in made if one.made_at > now - HOUR}
    assert recent <= kept, "all of the last hour"
    hours = {one.made_at // HOUR for one in made if not one.made_at or one.made_at // HOUR > now // HOUR - WEEK_HOURS}
    assert hours <= {made[version].made_at // HOUR for version in kept}, "one an hour for a week"
    assert {name: topic.records[tag_slot(name)].version for name in tagged} == tagged, "tags for ever"
    assert len(topic.records) <= len(recent) + len(hours) + len(tagged), "and nothing else"


@given(gaps=gaps, start=st.sampled_from([0, START]), data=st.data())
def test_the_last_hour_one_an_hour_for_a_week_and_tags_are_kept_and_nothing_else(
    gaps: list[int], start: int, data: st.DataObject
) -> None:
    topic, tagged = Compacted(), dict[str, int]()
    versions = schedule(gaps, start)
    for number in range(1, len(versions) + 1):
        written, gone = changes(topic.held, versions[max(0, number - KEPT) : number])
        topic.write(written, gone)
        if data.draw(st.integers(0, 20)) == 0 and (slot := slot_of(topic.held, data.draw(st.integers(0, number - 1)))):
            name = data.draw(st.sampled_from(["good", "better"]))
            topic.write({tag_slot(name): topic.records[slot]})
            tagged[name] = topic.records[slot].version
        check_promise(topic, versions[:number], tagged)
    assert tags(topic.held) == tagged


@given(gaps=gaps, missed=st.sets(st.integers(0, 119)))
def test_versions_that_were_not_written_are_written_with_one_of_the_next(gaps: list[int], missed: set[int]) -> None:
    """A learner may die, or fail to write, after it has published; no eight versions in a row are missed."""
    topic, versions = Compacted(), schedule(gaps)
    for number in range(1, len(versions) + 1):
        if number - 1 in missed and number % (KEPT - 1) and number < len(versions):
            continue
        written, gone = changes(topic.held, versions[max(0, number - KEPT) : number])
        topic.write(written, gone)
        assert changes(topic.held, versions[max(0, number - KEPT) : number]) == ({}, []), "again changes nothing"
        now = versions[number - 1].made_at
        kept = {one.version for one in topic.records.values()}
        assert {one.version for one in versions[:number] if one.made_at > now - HOUR} <= kept


@pytest.mark.parametrize(
    ("kept", "text"),
    [([], "none is"), ([3], "the nearest is 3"), ([20, 15], "the nearest is 15"), ([1, 9, 13, 20], "9 and 13")],
)
def test_a_version_that_is_not_kept_has_neighbours(kept: list[int], text: str) -> None:
    assert str(not_kept(12, kept)).startswith("version 12 is not kept; ")
    assert text in str(not_kept(12, kept))
