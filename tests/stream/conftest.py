"""Events as hypothesis draws them, and how each is written and read."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import strategies as st

from worker.stream import decoding, encoding
from worker.stream.contexts import MISSING
from worker.stream.events import (
    MODES,
    MOST,
    MOST_PARTITIONS,
    TAG_PATTERN,
    Action,
    ArmChange,
    ArmEntry,
    Arrival,
    CatalogueChange,
    Command,
    Decision,
    Episode,
    Feedback,
    FeedbackFact,
    Import,
    Opened,
    Progress,
    Tag,
)
from worker.stream.features import Features, context_encoder

#: Limits and settings so wide that a record is rejected only for its own content.
WIDE = decoding.Limits(max_record_bytes=2**40, max_norm=sys.float_info.max, max_ahead_ms=MOST)
WIDE_HORIZON = 10**1000

# Neither control characters, which are refused, nor surrogates, which UTF-8 lacks.
ids = st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1, max_size=20)
short_ids = st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1, max_size=8)
counts = st.integers(0, MOST)
positions = st.integers(1, MOST)
numbers = st.floats(allow_nan=False, allow_infinity=False)
amounts = st.floats(0, allow_infinity=False)


def tuples(items: st.SearchStrategy[Any], most: int = 6) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(items, max_size=most).map(tuple)


def named(values: st.SearchStrategy[Any], names: str) -> dict[str, st.SearchStrategy[Any]]:
    return dict.fromkeys(names.split(), values)


#: Values of the fields of events, by name.
FIELDS = {
    **named(ids, "session_id arm"),
    **named(counts, "occurred_at arrived_at window_start window_end time version parameters_version"),
    **named(counts, "sessions displays clicks late explore_budget"),
    **named(st.none() | counts, "folds observations newton_steps learned"),
    **named(positions, "position"),
    **named(amounts, "reward explored beta"),
    **named(st.none() | amounts, "parameter_norm"),
    **named(numbers, "value expected_reward"),
    **named(st.none() | numbers, "regret_bound regret_posterior smallest_eigenvalue"),
    **named(tuples(numbers), "context thresholds"),
    **named(tuples(short_ids), "slate exclude"),
    **named(st.booleans(), "clicked active frozen uncertain"),
    **named(st.sampled_from(MODES), "mode"),
    **named(st.floats(0, 1, exclude_min=True), "propensity"),
    **named(st.none() | st.floats(0, 1, exclude_min=True), "share kept"),
    **named(st.none() | tuples(st.tuples(counts, counts)), "opened"),
    **named(st.none() | st.floats(0, 1), "lowest_answer_rate"),
    **named(st.none() | short_ids, "rejected"),
    **named(st.none() | tuples(short_ids), "tokens unanswered_arms"),
    **named(st.from_regex(TAG_PATTERN, fullmatch=True), "name"),
    **named(st.dictionaries(short_ids, numbers | short_ids), "parameters"),
    **named(st.booleans(), "arms"),
    **named(st.none() | st.text(st.characters(exclude_categories=["Cs"])), "token"),
}


def drawn(event: type[Any], **special: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Draw an event; `special` overrides the values of some fields."""
    names = [field.name for field in msgspec.structs.fields(event)]
    return st.builds(event, **{name: special[name] if name in special else FIELDS[name] for name in names})


@st.composite
def opened(draw: st.DrawFn) -> Opened:
    slate = draw(tuples(short_ids))
    modes = tuple(draw(st.sampled_from(MODES)) for _ in slate)
    context = tuples(numbers | st.just(MISSING))
    return draw(drawn(Opened, slate=st.just(slate), modes=st.just(modes), context=context))


@st.composite
def progress(draw: st.DrawFn) -> Progress:
    partitions = draw(st.integers(1, MOST_PARTITIONS))
    return draw(drawn(Progress, partitions=st.just(partitions), partition=st.integers(0, partitions - 1)))


@st.composite
def command(draw: st.DrawFn) -> Command:
    action = draw(st.sampled_from(get_args(Action)))
    return Command(action=action, version=draw(counts) if action == "rollback" else None)


def arrive(value: bytes | None) -> Arrival:
    """Read an arrival, whatever dimension it has and whatever names its context has."""
    if (names := _names(value)) is not None:
        features = Features.of_table({"context": names or {"nothing": "number"}})
        encoder = context_encoder(features)
        return decoding.decode_arrival(value, limits=WIDE, dim=features.dim, timestamp=0, encoder=encoder)
    try:
        return decoding.decode_arrival(value, limits=WIDE, dim=-1, timestamp=0)
    except decoding.Rejected as rejected:
        if rejected.reason != "dimension":
            raise
        found = int(rejected.error.split("has ")[1].split(" ")[0])
        return decoding.decode_arrival(value, limits=WIDE, dim=found, timestamp=0)


def _names(value: bytes | None) -> dict[str, Any] | None:
    """Return the declaration that fits a context object; None if the context is none."""
    try:
        context = json.loads(value or b"")["context"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    if not isinstance(context, dict):
        return None
    return {name: {"hashed": 2} if isinstance(one, str) else "number" for name, one in context.items()}


def respond(value: bytes | None) -> Feedback:
    """Read feedback for a session of any length."""
    return decoding.decode_feedback(value, limits=WIDE, horizon=WIDE_HORIZON, timestamp=0)


@dataclass(frozen=True)
class Kind:
    """A kind of event: where its schema is, how to write it, read it and draw it."""

    event: type[Any]
    schema: str
    encode: Callable[[Any], bytes]
    decode: Callable[[bytes | None], Any]
    draw: st.SearchStrategy[Any]
    tag: str | None = None

    def __str__(self) -> str:
        return self.event.__name__


def fact(event: type[Any], tag: str, draw: st.SearchStrategy[Any]) -> Kind:
    return Kind(event, "journal", encoding.encode_journal, decoding.decode_journal, draw, tag)


#: Features of an arm, and numbers of a context that may be missing.
features = st.none() | st.dictionaries(short_ids, numbers | short_ids, min_size=1, max_size=3)

#: Each number of a context is small enough for the widest norm.
small = tuples(st.floats(-1e300, 1e300))
rewards = st.floats(0, exclude_min=True, allow_infinity=False)

entries = tuples(drawn(ArmEntry, reward=rewards, features=features))

KINDS = (
    Kind(Arrival, "arrival", encoding.encode_arrival, arrive, drawn(Arrival, context=small)),
    Kind(Feedback, "click", encoding.encode_feedback, respond, drawn(Feedback)),
    Kind(
        Decision,
        "decision",
        encoding.encode_decision,
        decoding.decode_decision,
        drawn(Decision, arm=st.none() | short_ids),
    ),
    Kind(Episode, "episode", encoding.encode_episode, decoding.decode_episode, drawn(Episode)),
    fact(Opened, "opened", opened()),
    fact(FeedbackFact, "feedback", drawn(FeedbackFact)),
    fact(Progress, "progress", progress()),
    fact(ArmChange, "arm", drawn(ArmChange, reward=rewards, features=features)),
    fact(CatalogueChange, "arms", drawn(CatalogueChange, changes=entries)),
    fact(Command, "command", command()),
    fact(Import, "import", drawn(Import)),
    fact(Tag, "tag", drawn(Tag, version=st.none() | counts)),
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
