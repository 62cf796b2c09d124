from __future__ import annotations

import copy
import gc
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.stream.events import ACTIONS, DEAD_LETTER_REASONS, MODES, TOPICS, Command


@settings(max_examples=20)
@given(data=st.data())
def test_an_event_cannot_be_changed(kind: Any, data: st.DataObject) -> None:
    event = data.draw(kind.draw)
    for field in msgspec.structs.fields(event):
        with pytest.raises(AttributeError):
            setattr(event, field.name, None)


@settings(max_examples=20)
@given(data=st.data())
def test_equal_events_have_equal_hashes_so_that_they_can_be_counted(kind: Any, data: st.DataObject) -> None:
    event = data.draw(kind.draw)
    assert copy.copy(event) == event
    assert hash(copy.copy(event)) == hash(event)


def test_events_are_made_by_names_only(kind: Any) -> None:
    with pytest.raises(TypeError):
        kind.event("s", 1)


@settings(max_examples=20)
@given(data=st.data())
def test_the_garbage_collector_does_not_look_at_events(kind: Any, data: st.DataObject) -> None:
    # A hundred thousand open sessions would otherwise be walked again and again.
    assert not gc.is_tracked(data.draw(kind.draw))


@pytest.mark.parametrize("action", ["freeze", "unfreeze"])
def test_only_a_rollback_takes_a_version(action: Any) -> None:
    assert Command(action=action).version is None
    with pytest.raises(ValueError, match="takes no version"):
        Command(action=action, version=1)


def test_a_rollback_without_a_version_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a version"):
        Command(action="rollback")


def test_the_closed_lists_are_those_of_the_contract() -> None:
    assert MODES == ("warmup", "random", "fallback", "explore", "exploit", "none")
    assert ACTIONS == ("freeze", "unfreeze", "rollback")
    assert DEAD_LETTER_REASONS == (
        "undecodable",
        "invalid",
        "too-large",
        "dimension",
        "norm",
        "future",
        "position",
        "unknown-arm",
        "arm-mismatch",
        "token",
        "session-reused",
        "parked-overflow",
    )
    assert TOPICS == (
        "arrivals",
        "clicks",
        "decisions",
        "journal",
        "parameters",
        "episodes",
        "dead-letters",
    )
