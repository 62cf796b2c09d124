"""Events as hypothesis draws them, and how each is written and read."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from hypothesis import strategies as st
from msgspec import inspect

from worker.stream import decoding
from worker.stream.contexts import MISSING
from worker.stream.events import (
    MODES,
    MOST,
    MOST_PARTITIONS,
    Action,
    ArmChange,
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
WIDE = decoding.Limits(max_record_bytes=2**40, max_norm=sys.float_info.max, max_ahead=MOST)
WIDE_HORIZON = 10**1000

# Neither control characters, which are refused, nor surrogates, which UTF-8 lacks.
texts = st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1, max_size=12)
numbers = st.floats(allow_nan=False, allow_infinity=False)


def tuples(items: st.SearchStrategy[Any], most: int = 6) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(items, max_size=most).map(tuple)


def values(kind: inspect.Type) -> st.SearchStrategy[Any]:
    """Draw the values of a type of msgspec, within its bounds."""
    match kind:
        case inspect.Metadata():
            return values(kind.type)
        case inspect.NoneType():
            return st.none()
        case inspect.BoolType():
            return st.booleans()
        case inspect.IntType():
            return st.integers(1 if kind.ge is None else kind.ge, kind.le or MOST)
        case inspect.FloatType(gt=None, ge=None):
            return numbers
        case inspect.FloatType():
            return st.floats(0, kind.le, exclude_min=kind.ge is None, allow_infinity=False)
        case inspect.StrType():
            return texts if kind.pattern is None else st.from_regex(kind.pattern, fullmatch=True)
        case inspect.LiteralType():
            return st.sampled_from(kind.values)
        case inspect.VarTupleType():
            return tuples(values(kind.item_type))
        case inspect.TupleType():
            return st.tuples(*map(values, kind.item_types))
        case inspect.NamedTupleType():
            return st.builds(kind.cls, *(values(field.type) for field in kind.fields))
        case inspect.UnionType():
            return st.one_of(map(values, kind.types))
        case inspect.StructType():
            return drawn(kind.cls)
    return st.dictionaries(texts, numbers | texts, min_size=1, max_size=3)


def drawn(event: type[Any], **special: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Draw an event by the types of its fields; `special` overrides the values of some."""
    kind = inspect.type_info(event)
    assert isinstance(kind, inspect.StructType)
    return st.builds(event, **{one.name: special.get(one.name, values(one.type)) for one in kind.fields})


@st.composite
def opened(draw: st.DrawFn) -> Opened:
    slate = draw(tuples(texts))
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
    return Command(action=action, version=draw(st.integers(0, MOST)) if action == "rollback" else None)


def settings(dim: int) -> Any:
    """Return what decoding needs of settings; schemas know no dimension, not even that it is above 0."""
    return SimpleNamespace(dim=dim, standardise=False, grace=0)


def arrive(value: bytes | None) -> Arrival:
    """Read an arrival, whatever dimension it has and whatever names its context has."""
    if (names := _names(value)) is not None:
        features = Features.of_table({"context": names or {"nothing": "number"}})
        encoder = context_encoder(features)
        return decoding.decode_arrival(value, settings(features.dim), limits=WIDE, timestamp=0, encoder=encoder)
    try:
        return decoding.decode_arrival(value, settings(-1), limits=WIDE, timestamp=0)
    except decoding.Rejected as rejected:
        if rejected.reason != "dimension":
            raise
        found = int(rejected.error.split("has ")[1].split(" ")[0])
        return decoding.decode_arrival(value, settings(found), limits=WIDE, timestamp=0)


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
    """A kind of event: where its schema is, how to read it and to draw it."""

    event: type[Any]
    schema: str
    decode: Callable[[bytes | None], Any]
    draw: st.SearchStrategy[Any]
    tag: str | None = None

    def __str__(self) -> str:
        return self.event.__name__


def fact(event: type[Any], tag: str, draw: st.SearchStrategy[Any]) -> Kind:
    return Kind(event, "journal", decoding.decode_journal, draw, tag)


#: Each number of a context is small enough for the widest norm.
small = tuples(st.floats(-1e300, 1e300))

KINDS = (
    Kind(Arrival, "arrival", arrive, drawn(Arrival, context=small)),
    Kind(Feedback, "click", respond, drawn(Feedback)),
    Kind(Decision, "decision", decoding.decode_decision, drawn(Decision)),
    Kind(Episode, "episode", decoding.decode_episode, drawn(Episode)),
    fact(Opened, "opened", opened()),
    fact(FeedbackFact, "feedback", drawn(FeedbackFact)),
    fact(Progress, "progress", progress()),
    fact(ArmChange, "arm", drawn(ArmChange)),
    fact(CatalogueChange, "arms", drawn(CatalogueChange)),
    fact(Command, "command", command()),
    fact(Import, "import", drawn(Import)),
    fact(Tag, "tag", drawn(Tag)),
)


@pytest.fixture(scope="session", params=KINDS, ids=str)
def kind(request: pytest.FixtureRequest) -> Kind:
    """Each kind of event in turn."""
    found: Kind = request.param
    return found
