"""Records that no worker can use, each with the reasons that its dead letter may give."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tests.kafka.hostile.ledger import now_ms

UNDECODABLE, INVALID = frozenset({"undecodable"}), frozenset({"invalid"})


class Bad(NamedTuple):
    """A record, the reasons that its dead letter may give, and its name in the timeline."""

    topic: str
    key: bytes | None
    value: bytes | None
    reasons: frozenset[str]
    what: str
    timestamp: int | None = None


def arrival(session: str, **changes: Any) -> dict[str, Any]:
    return {"session_id": session, "occurred_at": now_ms(), "context": [0.1, 0.2, 0.3], **changes}


def feedback(session: str, **changes: Any) -> dict[str, Any]:
    body = {"session_id": session, "occurred_at": now_ms(), "position": 1, "arm": "ad-1", "clicked": True}
    return {**body, "token": "1.x", **changes}


def _without(body: dict[str, Any], name: str) -> dict[str, Any]:
    return {field: value for field, value in body.items() if field != name}


# ── garbage ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def unreadable(chance: random.Random, name: str) -> Iterator[tuple[bytes | None, frozenset[str], str]]:
    """Yield values that are not JSON, or not of the right shape, whatever the topic."""
    yield b"\xff" + chance.randbytes(chance.randrange(2_000)), UNDECODABLE, "random bytes"
    yield None, UNDECODABLE, "tombstone"
    yield b"", UNDECODABLE, "empty"
    yield json.dumps(arrival(name)).encode()[: chance.randrange(5, 40)], UNDECODABLE, "cut off"
    yield json.dumps(arrival(name)).encode("utf-16"), UNDECODABLE, "UTF-16"
    yield b"[" * 30_000 + b"]" * 30_000, UNDECODABLE, "deep nesting"
    yield b'{"a":' * 8_000 + b"1" + b"}" * 8_000, UNDECODABLE, "deep nesting"
    yield b" " * 70_000 + b"{}", frozenset({"too-large"}), "too large"
    for value in (5, None, "text", [], {}, True, [arrival(name)], {"session_id": name}):
        yield json.dumps(value).encode(), INVALID, "JSON of a wrong type"


def bad_arrivals(chance: random.Random, name: str) -> Iterator[tuple[bytes | None, frozenset[str], str]]:
    def one(what: str, *reasons: str, **changes: Any) -> tuple[bytes, frozenset[str], str]:
        return json.dumps(arrival(name, **changes)).encode(), frozenset(reasons), what

    yield one("a wrong dimension", "dimension", context=[1.0] * chance.choice((0, 1, 2, 4, 500)))
    yield one("a large norm", "norm", context=[1e200, 0, 0])
    yield one("a context of texts", "invalid", context=["1", "2", "3"])
    yield one("NaN", "undecodable", "invalid", context=[float("nan"), 0, 0])
    yield one("a nested context", "invalid", context=[[1, 2, 3]])
    yield one("a time as text", "invalid", occurred_at="2026-01-01T00:00:00Z")
    yield one("a negative time", "invalid", occurred_at=-5)
    yield one("half a millisecond", "invalid", occurred_at=now_ms() + 0.5)
    yield one("a huge time", "invalid", "future", occurred_at=10**19)
    yield one("a long id", "invalid", session_id=name * 40)
    yield one("a huge id", "too-large", session_id="x" * 100_000)
    yield one("an empty id", "invalid", session_id="")
    yield one("a control character", "invalid", session_id=f"{name}\x00")
    yield one("a number as id", "invalid", session_id=chance.randrange(10**9))
    yield one("an empty user", "invalid", user_id="")
    yield one("a user as number", "invalid", user_id=7)
    yield one("2,000 exclusions", "invalid", exclude=[f"ad-{k}" for k in range(2_000)])
    yield one("exclusions of a wrong type", "invalid", exclude={"ad": 1})
    for field in ("session_id", "occurred_at", "context"):
        yield json.dumps(_without(arrival(name), field)).encode(), INVALID, f"without {field}"


def bad_feedback(chance: random.Random, name: str) -> Iterator[tuple[bytes | None, frozenset[str], str]]:
    def one(what: str, *reasons: str, **changes: Any) -> tuple[bytes, frozenset[str], str]:
        return json.dumps(feedback(name, **changes)).encode(), frozenset(reasons), what

    yield one("a position out of range", "position", position=chance.choice((0, -1, 4, 10**6)))
    yield one("a huge position", "invalid", "position", position=10**30)
    yield one("a position as text", "invalid", position="1")
    yield one("clicked is no truth value", "invalid", clicked=chance.choice(("yes", 1, None)))
    yield one("an empty arm", "invalid", arm="")
    yield one("a long arm", "invalid", arm="a" * 500)
    yield one("an arm that is a number", "invalid", arm=4)
    yield one("a token of a wrong type", "invalid", token=[1])
    yield one("a token of nobody", "token", token=f"{now_ms()}.{'ab' * 16}")
    yield one("a huge token", "token", token="t" * 40_000)
    yield one("no token", "token", token=None)
    for field in ("session_id", "occurred_at", "position", "arm", "clicked"):
        yield json.dumps(_without(feedback(name), field)).encode(), INVALID, f"without {field}"


def garbage(chance: random.Random) -> list[Bad]:
    """Return garbage for both topics, under keys of all kinds; none has the bytes of a valid record."""
    made: list[Bad] = []
    kinds: tuple[tuple[str, Callable[..., Iterator[Any]]], ...] = (("arrivals", bad_arrivals), ("clicks", bad_feedback))
    for topic, own in kinds:
        for source in (unreadable, own):
            name = f"bad-{chance.randrange(10**9)}"
            for value, reasons, what in source(chance, name):
                key = chance.choice((name.encode(), None, b"", chance.randbytes(8), b"k" * 5_000))
                made.append(Bad(topic, key, value, reasons, what))
    chance.shuffle(made)
    return made


# ── times ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def wrong_units(chance: random.Random) -> list[Bad]:
    """Return arrivals in seconds and microseconds."""
    made = []
    for divide, reason in ((1 / 1_000, "past"), (1_000, "future"), (1_000_000, "future")):
        name = f"unit-{chance.randrange(10**9)}"
        value = json.dumps(arrival(name, occurred_at=int(now_ms() * divide))).encode()
        # A number of nanoseconds is beyond what JSON keeps exactly.
        reasons = frozenset({reason, "invalid"} if divide == 1_000_000 else {reason})
        made.append(Bad("arrivals", name.encode(), value, reasons, "a wrong unit"))
    return made


YEAR_2100 = 4_102_444_800_000


def far_future(chance: random.Random) -> list[Bad]:
    """Return arrivals and feedback of the year 2100, in records of that year where the broker allows it."""
    made = []
    for timestamp in (YEAR_2100, now_ms() + 50 * 60_000, None):
        name = f"future-{chance.randrange(10**9)}"
        at = timestamp or YEAR_2100
        one = json.dumps(arrival(name, occurred_at=at)).encode()
        two = json.dumps(feedback(name, occurred_at=at)).encode()
        made.append(Bad("arrivals", name.encode(), one, frozenset({"future"}), "far future", timestamp))
        made.append(Bad("clicks", name.encode(), two, frozenset({"future", "token"}), "far future", timestamp))
    return made
