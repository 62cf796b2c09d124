"""Real records, broken in every way that came to mind: each still decodes, or is rejected with a reason.

``ADCASCADE_FUZZ=1000000 pytest tests/stream/test_codec_fuzz.py`` breaks a million.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

from tests.stream.broken import MARK, MUTATIONS, NOW, flip_bits
from worker.stream import codec
from worker.stream.codec import Limits, Rejected
from worker.stream.events import (
    DEAD_LETTER_REASONS,
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

RECORDS = int(os.environ.get("ADCASCADE_FUZZ", "50000"))
SEED = 20_251_116
LIMITS = Limits(max_record_bytes=16_384)


def decode_arrival(value: bytes) -> Arrival:
    return codec.decode_arrival(value, limits=LIMITS, dim=4, timestamp=NOW)


def decode_feedback(value: bytes) -> Feedback:
    return codec.decode_feedback(value, limits=LIMITS, horizon=5, timestamp=NOW)


Reader = Callable[[bytes], Any]
Writer = Callable[[Any], bytes]

# (reader, writer, events): what is read by the first and written by the second.
TRAFFIC: tuple[tuple[Reader, Writer, tuple[Any, ...]], ...] = (
    (
        decode_arrival,
        codec.encode_arrival,
        (
            Arrival(session_id=f"{MARK}-1", occurred_at=NOW, context=(0.25, -1.5, 1e-9, 3.0)),
            Arrival(
                session_id=f"{MARK}-zoë-\U0001f600",
                occurred_at=NOW + 1,
                context=(0.0, 1.0, -2.0, 123.456),
                exclude=(f"{MARK}-shoes", f'{MARK}-"hats"\\'),
            ),
        ),
    ),
    (
        decode_feedback,
        codec.encode_feedback,
        (
            Feedback(session_id=f"{MARK}-1", occurred_at=NOW, position=1, arm=f"{MARK}-a", clicked=False),
            Feedback(
                session_id=f"{MARK}-2",
                occurred_at=NOW + 9,
                position=5,
                arm=f"{MARK}-ß",
                clicked=True,
                token=f"{NOW}.{MARK}",
            ),
        ),
    ),
    (
        codec.decode_decision,
        codec.encode_decision,
        (
            Decision(
                session_id=f"{MARK}-1",
                arrived_at=NOW,
                position=1,
                arm=f"{MARK}-a",
                slate=(f"{MARK}-a", f"{MARK}-b"),
                mode="explore",
                propensity=1.0,
                parameters_version=7,
                value=0.125,
                tokens=(f"{NOW}.{MARK}", f"{NOW}.{MARK}"),
            ),
        ),
    ),
    (
        codec.decode_journal,
        codec.encode_journal,
        (
            Opened(
                session_id=f"{MARK}-1",
                arrived_at=NOW,
                context=(0.25, -1.5, 1e-9, 3.0),
                slate=(f"{MARK}-a", f"{MARK}-b"),
                modes=("explore", "exploit"),
                exclude=(f"{MARK}-c",),
                parameters_version=7,
            ),
            FeedbackFact(session_id=f"{MARK}-1", occurred_at=NOW, position=2, arm=f"{MARK}-b", clicked=True),
            Progress(partition=3, partitions=8, time=NOW),
            ArmChange(arm=f"{MARK}-d", reward=2.5, active=True),
            Command(action="rollback", version=4),
            Command(action="freeze"),
        ),
    ),
    (
        codec.decode_episode,
        codec.encode_episode,
        (
            Episode(
                version=8,
                window_start=NOW,
                window_end=NOW + 60_000,
                sessions=50,
                displays=120,
                clicks=30,
                reward=17.5,
                expected_reward=16.25,
                explored=4.8,
                late=1,
                beta=1.5,
                explore_budget=5,
                thresholds=(0.5, 0.25),
                regret_bound=0.75,
                regret_posterior=None,
                frozen=False,
                rejected=MARK,
                folds=8,
            ),
        ),
    ),
)

# ── the test ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def outcome(read: Reader, write: Writer, record: bytes) -> str:
    """Read one record and say what became of it."""
    try:
        event = read(record)
    except Rejected as rejected:
        assert rejected.reason in DEAD_LETTER_REASONS
        assert MARK not in rejected.error
        assert rejected.error.isprintable()
        assert 0 < len(rejected.error) <= 120
        return rejected.reason
    # What was let in can be written again, and is then the same.
    assert read(write(event)) == event
    return "accepted"


def test_a_broken_record_decodes_or_is_rejected_and_nothing_else_happens() -> None:
    rng = Random(SEED)
    corpus = [(read, write, write(event)) for read, write, events in TRAFFIC for event in events]
    assert [outcome(*entry) for entry in corpus] == ["accepted"] * len(corpus)
    outcomes: Counter[str] = Counter()
    for _ in range(RECORDS):
        read, write, record = rng.choice(corpus)
        mutate = rng.choice(MUTATIONS)
        broken = mutate(rng, record, rng.choice(corpus)[2])
        if rng.random() < 0.1:
            broken = flip_bits(rng, broken or b"\x00", record)
        try:
            outcomes[outcome(read, write, broken)] += 1
        except Exception as error:
            error.add_note(f"{mutate.__name__} made, for {read.__name__}: {broken[:500]!r}")
            raise
    assert outcomes.total() == RECORDS
    # All that the codec can say was said: the mutations reach every branch.
    reached = {"accepted", "undecodable", "invalid", "too-large", "dimension", "norm", "future", "position"}
    assert set(outcomes) == reached
