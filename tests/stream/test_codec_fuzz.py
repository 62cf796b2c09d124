"""Records broken in many ways: each still decodes, or is rejected with a reason.

``ADCASCADE_FUZZ=1000000 pytest tests/stream/test_codec_fuzz.py`` breaks a million.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

from msgspec import structs

from tests.metrics.episodes import an_episode
from tests.stream.scenes import decision, feedback, opened
from worker.stream import decoding
from worker.stream.decoding import Limits, Rejected
from worker.stream.events import DEAD_LETTER_REASONS, ArmChange, Arrival, Command, Feedback, Progress, encode_event
from worker.stream.settings import LearningSettings

RECORDS = int(os.environ.get("ADCASCADE_FUZZ", "50000"))
SEED = 20_251_116
NOW = 1_700_000_000_000
LIMITS = Limits(max_record_bytes=16_384)
# Part of every text of every record; must never occur in an error.
MARK = "PAYLOAD"


def decode_arrival(value: bytes) -> Arrival:
    return decoding.decode_arrival(value, LearningSettings(dim=4, standardise=False), limits=LIMITS, timestamp=NOW)


def decode_feedback(value: bytes) -> Feedback:
    return decoding.decode_feedback(value, limits=LIMITS, horizon=5, timestamp=NOW)


Reader = Callable[[bytes], Any]

CONTEXT = (0.25, -1.5, 1e-9, 3.0)
SLATE = (f"{MARK}-a", f"{MARK}-b")
DECISION = decision(f"{MARK}-1", SLATE, mode="explore", tokens=(f"{NOW}.{MARK}", f"{NOW}.{MARK}"))
FACTS = (
    opened(f"{MARK}-1", NOW, SLATE, context=CONTEXT, modes=("explore", "exploit"), exclude=(f"{MARK}-c",)),
    feedback(2, f"{MARK}-b", True, NOW, f"{MARK}-1"),
    Progress(partition=3, partitions=8, time=NOW),
    ArmChange(arm=f"{MARK}-d", reward=2.5, active=True),
    Command(action="rollback", version=4),
    Command(action="freeze"),
)
ARRIVALS = (
    Arrival(session_id=f"{MARK}-1", occurred_at=NOW, context=CONTEXT),
    Arrival(
        session_id=f"{MARK}-zoë-\U0001f600",
        occurred_at=NOW + 1,
        context=(0.0, 1.0, -2.0, 123.456),
        exclude=(f"{MARK}-shoes", f'{MARK}-"hats"\\'),
    ),
)
PASSED = Feedback(session_id=f"{MARK}-1", occurred_at=NOW, position=1, arm=f"{MARK}-a", clicked=False)
ANSWERS = (PASSED, structs.replace(PASSED, position=5, arm=f"{MARK}-ß", clicked=True, token=f"{NOW}.{MARK}"))

# The events that each reader reads.
TRAFFIC: tuple[tuple[Reader, tuple[Any, ...]], ...] = (
    (decode_arrival, ARRIVALS),
    (decode_feedback, ANSWERS),
    (decoding.decode_decision, (DECISION,)),
    (decoding.decode_journal, FACTS),
    (decoding.decode_episode, (an_episode(8, rejected=MARK),)),
)

# ── ways to break a record ───────────────────────────────────────────────────────────────────────────────────────────

NUMBERS = b"NaN Infinity -Infinity nan null true 1e999 -1e999 1e-999 0x10 01 1. .5 +1 -0 1E400".split()
TEXTS = rb""""\ud800" "\udc00\ud800" "\u0000" "\x41" " 'a' [ ] {} /**/ , :""".split()
TOKENS = (
    *NUMBERS,
    *TEXTS,
    *(b"9" * 400, b"-" + b"9" * 5_000, b"18446744073709551616", b"9007199254740993", b"\x00"),
)

BAD_UTF8 = (b"\xff", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xe2\x82", b"\x80", b"\xef\xbb\xbf")

SWAPS: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 6, 2**31, 2**53 + 1, 10**40, NOW + 60_001, 0.5, 5.0, 1e300, -1e300),
    *("", "5", MARK * 40, f"{MARK}\n", "\x00"),
    *([], [[]], [MARK], [1, 2, 3, 4], [1, 2, 3], [1e300] * 4, [1] * 3_000, [MARK] * 1_001),
    *({}, {MARK: MARK}, {"kind": "opened"}),
)


def flip_bits(rng: Random, record: bytes, other: bytes) -> bytes:
    broken = bytearray(record)
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        broken[rng.randrange(len(broken))] ^= 1 << rng.randrange(8)
    return bytes(broken)


def replace_bytes(rng: Random, record: bytes, other: bytes) -> bytes:
    broken = bytearray(record)
    for _ in range(rng.choice((1, 2, 4))):
        broken[rng.randrange(len(broken))] = rng.choice(b'{}[]":,\\-+.eE0159ntf \t\n\x00\x7f\x80\xff')
    return bytes(broken)


def truncate(rng: Random, record: bytes, other: bytes) -> bytes:
    start, end = sorted((rng.randrange(len(record)), rng.randrange(len(record) + 1)))
    return record[:end] if rng.random() < 0.7 else record[start:end]


def splice(rng: Random, record: bytes, other: bytes) -> bytes:
    return record[: rng.randrange(len(record))] + other[rng.randrange(len(other)) :]


def repeat_a_piece(rng: Random, record: bytes, other: bytes) -> bytes:
    start, end = sorted((rng.randrange(len(record)), rng.randrange(len(record) + 1)))
    return record[:end] + record[start:end] * rng.choice((1, 1, 3, 200)) + record[end:]


def insert_token(rng: Random, record: bytes, other: bytes) -> bytes:
    at = rng.randrange(len(record))
    return record[:at] + rng.choice(TOKENS) + record[at + rng.choice((0, 1, 4)) :]


def replace_a_number(rng: Random, record: bytes, other: bytes) -> bytes:
    digits = [i for i in range(len(record)) if record[i : i + 1].isdigit()]
    if not digits:
        return record + rng.choice(TOKENS)
    start = end = rng.choice(digits)
    while record[end : end + 1].isdigit():
        end += 1
    return record[:start] + rng.choice(TOKENS) + record[end:]


def spoil_utf8(rng: Random, record: bytes, other: bytes) -> bytes:
    at = rng.randrange(len(record))
    return record[:at] + rng.choice(BAD_UTF8) + record[at:]


def swap_a_value(rng: Random, record: bytes, other: bytes) -> bytes:
    document = json.loads(record)
    name = rng.choice(list(document))
    if isinstance(document[name], list) and document[name] and rng.random() < 0.5:
        document[name][rng.randrange(len(document[name]))] = rng.choice(SWAPS)
    else:
        document[name] = rng.choice(SWAPS)
    return json.dumps(document, ensure_ascii=rng.random() < 0.5).encode()


def drop_or_add_fields(rng: Random, record: bytes, other: bytes) -> bytes:
    document = json.loads(record)
    if rng.random() < 0.5:
        document.pop(rng.choice(list(document)))
    else:
        document.update(json.loads(other))
    document[rng.choice(("x", "kind", "token", MARK))] = rng.choice(SWAPS)
    return json.dumps(document).encode()


def duplicate_a_key(rng: Random, record: bytes, other: bytes) -> bytes:
    document = json.loads(record)
    name = rng.choice(list(document))
    again = json.dumps({name: rng.choice((document[name], rng.choice(SWAPS)))}).encode()
    return again[:-1] + b"," + record[1:] if rng.random() < 0.5 else record[:-1] + b"," + again[1:]


def nest(rng: Random, record: bytes, other: bytes) -> bytes:
    depth = rng.choice((3, 100, decoding.MAX_DEPTH - 2, decoding.MAX_DEPTH + 2, 1_200, 4_000))
    opening, closing = rng.choice(((b"[", b"]"), (b'{"a":', b"}"), (b'[{"":', b"}]")))
    nested = opening * depth + b"0" + closing * rng.choice((depth, depth, depth - 1, 0))
    name = rng.choice((b'"x"', b'"context"', b'"session_id"', b'"kind"'))
    return record[:-1] + b"," + name + b":" + nested + b"}"


def noise(rng: Random, record: bytes, other: bytes) -> bytes:
    return rng.randbytes(rng.choice((0, 1, 7, 64, 300)))


CHEAP = (
    *(flip_bits, replace_bytes, truncate, splice, repeat_a_piece, insert_token, replace_a_number, spoil_utf8),
    *(swap_a_value, drop_or_add_fields, duplicate_a_key),
)
MUTATIONS = (*CHEAP * 4, noise, nest)  # the slow one (records of many kilobytes) comes less often


# ── the test ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def outcome(read: Reader, record: bytes) -> str:
    """Read one record; return the reason of its rejection, or "accepted"."""
    try:
        event = read(record)
    except Rejected as rejected:
        assert rejected.reason in DEAD_LETTER_REASONS
        assert MARK not in rejected.error
        assert rejected.error.isprintable()
        assert 0 < len(rejected.error) <= 120
        return rejected.reason
    # An accepted record is the same after it is written and read again.
    assert read(encode_event(event)) == event
    return "accepted"


def test_a_broken_record_decodes_or_is_rejected_and_nothing_else_happens() -> None:
    rng = Random(SEED)
    corpus = [(read, encode_event(event)) for read, events in TRAFFIC for event in events]
    assert [outcome(*entry) for entry in corpus] == ["accepted"] * len(corpus)
    outcomes: Counter[str] = Counter()
    for _ in range(RECORDS):
        read, record = rng.choice(corpus)
        mutate = rng.choice(MUTATIONS)
        broken = mutate(rng, record, rng.choice(corpus)[1])
        if rng.random() < 0.1:
            broken = flip_bits(rng, broken or b"\x00", record)
        try:
            outcomes[outcome(read, broken)] += 1
        except Exception as error:
            error.add_note(f"{mutate.__name__} made of {record[:100]!r}: {broken[:500]!r}")
            raise
    assert outcomes.total() == RECORDS
    # The mutations reach every branch of the codec.
    reached = {"accepted", "undecodable", "invalid", "too-large", "dimension", "norm", "future", "past", "position"}
    assert set(outcomes) == reached
