"""Events as hypothesis draws them, and how each is written and read."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import orjson
import pytest
from hypothesis import strategies as st

from worker.stream import decoding, encoding
from worker.stream.events import (
    ACTIONS,
    MODES,
    MOST,
    ArmChange,
    Arrival,
    Command,
    Decision,
    Episode,
    Feedback,
    FeedbackFact,
    Opened,
    Progress,
)

#: Limits and settings so wide that only what a record says by itself can make it rejected.
WIDE = decoding.Limits(max_record_bytes=2**40, max_norm=sys.float_info.max, max_ahead_ms=MOST)
WIDE_HORIZON = 10**1000

# Neither control characters, which are refused, nor surrogates, which UTF-8 cannot say.
ids = st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1, max_size=20)
short_ids = st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1, max_size=8)
times = st.integers(0, MOST)
counts = st.integers(0, MOST)
positions = st.integers(1, MOST)
numbers = st.floats(allow_nan=False, allow_infinity=False)
amounts = st.floats(0, allow_infinity=False)


def tuples(items: st.SearchStrategy[Any], most: int = 6) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(items, max_size=most).map(tuple)


@st.composite
def opened(draw: st.DrawFn) -> Opened:
    slate = draw(tuples(short_ids))
    return Opened(
        session_id=draw(ids),
        arrived_at=draw(times),
        context=draw(tuples(numbers)),
        slate=slate,
        modes=tuple(draw(st.sampled_from(MODES)) for _ in slate),
        exclude=draw(tuples(short_ids)),
        parameters_version=draw(counts),
    )


@st.composite
def progress(draw: st.DrawFn) -> Progress:
    partitions = draw(positions)
    return Progress(partition=draw(st.integers(0, partitions - 1)), partitions=partitions, time=draw(times))


def arrive(value: bytes | None) -> Arrival:
    """Read an arrival, whatever dimension it has."""
    try:
        return decoding.decode_arrival(value, limits=WIDE, dim=-1, timestamp=0)
    except decoding.Rejected as rejected:
        if rejected.reason != "dimension":
            raise
        found = int(rejected.error.split("has ")[1].split(" ")[0])
        return decoding.decode_arrival(value, limits=WIDE, dim=found, timestamp=0)


def respond(value: bytes | None) -> Feedback:
    """Read feedback for a session of any length."""
    return decoding.decode_feedback(value, limits=WIDE, horizon=WIDE_HORIZON, timestamp=0)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of event: where its schema is, how to draw it, write it and read it."""

    event: type[Any]
    schema: str
    draw: st.SearchStrategy[Any]
    encode: Callable[[Any], bytes]
    decode: Callable[[bytes | None], Any]
    tag: str | None = None

    def __str__(self) -> str:
        return self.event.__name__


def encode_decision(decision: Decision) -> bytes:
    """Encode a decision by the shortest way; serving encodes it from the session's state."""
    document = msgspec.to_builtins(decision)
    return orjson.dumps({name: value for name, value in document.items() if name != "tokens" or value is not None})


KINDS = (
    Kind(
        event=Arrival,
        schema="arrival",
        # Each number is small enough for the widest norm.
        draw=st.builds(
            Arrival,
            session_id=ids,
            occurred_at=times,
            context=tuples(st.floats(-1e300, 1e300)),
            exclude=tuples(short_ids),
        ),
        encode=encoding.encode_arrival,
        decode=arrive,
    ),
    Kind(
        event=Feedback,
        schema="click",
        draw=st.builds(
            Feedback,
            session_id=ids,
            occurred_at=times,
            position=positions,
            arm=ids,
            clicked=st.booleans(),
            token=st.none() | st.text(st.characters(exclude_categories=["Cs"])),
        ),
        encode=encoding.encode_feedback,
        decode=respond,
    ),
    Kind(
        event=Decision,
        schema="decision",
        draw=st.builds(
            Decision,
            session_id=ids,
            arrived_at=times,
            position=positions,
            arm=st.none() | short_ids,
            slate=tuples(short_ids),
            mode=st.sampled_from(MODES),
            propensity=st.floats(0, 1, exclude_min=True),
            parameters_version=counts,
            value=numbers,
            tokens=st.none() | tuples(short_ids),
        ),
        encode=encode_decision,
        decode=decoding.decode_decision,
    ),
    Kind(
        event=Episode,
        schema="episode",
        draw=st.builds(
            Episode,
            version=counts,
            window_start=times,
            window_end=times,
            sessions=counts,
            displays=counts,
            clicks=counts,
            reward=amounts,
            expected_reward=numbers,
            explored=amounts,
            late=counts,
            beta=amounts,
            explore_budget=counts,
            thresholds=tuples(numbers),
            regret_bound=st.none() | numbers,
            regret_posterior=st.none() | numbers,
            frozen=st.booleans(),
            rejected=st.none() | short_ids,
            folds=st.none() | counts,
            observations=st.none() | counts,
            newton_steps=st.none() | counts,
            parameter_norm=st.none() | amounts,
            smallest_eigenvalue=st.none() | numbers,
        ),
        encode=encoding.encode_episode,
        decode=decoding.decode_episode,
    ),
    Kind(
        event=Opened,
        schema="journal",
        tag="opened",
        draw=opened(),
        encode=encoding.encode_opened,
        decode=decoding.decode_journal,
    ),
    Kind(
        event=FeedbackFact,
        schema="journal",
        tag="feedback",
        draw=st.builds(
            FeedbackFact,
            session_id=ids,
            occurred_at=times,
            position=positions,
            arm=ids,
            clicked=st.booleans(),
        ),
        encode=encoding.encode_feedback_fact,
        decode=decoding.decode_journal,
    ),
    Kind(
        event=Progress,
        schema="journal",
        tag="progress",
        draw=progress(),
        encode=encoding.encode_progress,
        decode=decoding.decode_journal,
    ),
    Kind(
        event=ArmChange,
        schema="journal",
        tag="arm",
        draw=st.builds(
            ArmChange,
            arm=ids,
            reward=st.floats(0, exclude_min=True, allow_infinity=False),
            active=st.booleans(),
        ),
        encode=encoding.encode_journal,
        decode=decoding.decode_journal,
    ),
    Kind(
        event=Command,
        schema="journal",
        tag="command",
        draw=st.sampled_from(ACTIONS).flatmap(
            lambda action: st.builds(
                Command,
                action=st.just(action),
                version=counts if action == "rollback" else st.none(),
            )
        ),
        encode=encoding.encode_journal,
        decode=decoding.decode_journal,
    ),
)


@pytest.fixture(scope="session", params=KINDS, ids=str)
def kind(request: pytest.FixtureRequest) -> Kind:
    """Each kind of event in turn."""
    found: Kind = request.param
    return found


@pytest.fixture(scope="session")
def kinds() -> tuple[Kind, ...]:
    """All kinds of events."""
    return KINDS
