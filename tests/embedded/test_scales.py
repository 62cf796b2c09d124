"""Contexts as people have them learn like standardised ones, through the whole stream.

A stream standardises by its first sessions. Given the same centre and scale beforehand, every slate is the same.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import orjson
import pytest

from tests.embedded.traffic import ARMS, arrivals, deliver, finish, settings
from worker.bandit.groups import Groups
from worker.embedded.runner import Embedded
from worker.stream.features import Features
from worker.stream.parameters import Parameters
from worker.stream.topology import Record

USERS = 1_800  # 150 per window: its first one is enough to standardise by
#: Users with a share in [0, 0.01], an amount up to a million cents, and four marks.
GENERATOR = np.random.default_rng(0)
RAW = np.column_stack(
    [GENERATOR.random(USERS) * 0.01, GENERATOR.integers(0, 10**6, USERS), GENERATOR.random((USERS, 4)) < 0.4]
)
#: What users decide by, whatever their contexts are given in.
STANDARD = (RAW - RAW.mean(axis=0)) / RAW.std(axis=0)
DECLARED = Features.of_table(
    {"context": {"share": "number", "cents": "number", **{f"mark-{n}": ["yes"] for n in range(1, 5)}}}
)


class Outcome(NamedTuple):
    """The first decisions of all users by session, and the last version."""

    slates: dict[str, list[str]]
    last: Parameters


def served(contexts: list[Any], **changes: Any) -> Outcome:
    """Serve all users with the personal model; no record is a dead letter, and no fold is rejected."""
    sent = [
        replace(one, value=orjson.dumps({**orjson.loads(one.value), "context": context}))
        for one, context in zip(arrivals(USERS, seconds=120), contexts, strict=True)
    ]
    slates: dict[str, list[str]] = {}

    def tap(record: Record, _: object) -> None:
        if record.topic == "ads.decisions":
            decision = orjson.loads(record.value or b"")
            slates.setdefault(decision["session_id"], decision["slate"])

    learning = settings(**{"dim": 6, "model": "personal", "standardise": True, **changes})
    runner = Embedded(learning, ARMS, partitions=2, tap=tap)
    standard = {one.session: row for one, row in zip(sent, STANDARD.tolist(), strict=True)}
    deliver(runner, sent, live=True, contexts=standard)
    finish(runner)
    assert not runner.tally.dead
    assert {episode.rejected for episode in runner.episodes} == {None}
    assert runner.learner.current.folds == 12
    return Outcome(slates, runner.learner.current)


def alike(one: Outcome, other: Outcome) -> float:
    """Return the share of users who got the same slate."""
    return float(np.mean([slate == other.slates[name] for name, slate in one.slates.items()]))


def by_name(rows: list[list[float]]) -> list[Any]:
    return [
        {"share": row[0], "cents": row[1], **{f"mark-{n}": "yes" for n in range(1, 5) if row[n + 1]}} for row in rows
    ]


def test_shares_cents_and_marks_learn_like_standardised_contexts() -> None:
    raw = served(RAW.tolist())
    beforehand = served(raw.last.prepared(RAW).tolist(), standardise=False)
    assert alike(raw, beforehand) > 0.99  # all of them here; rounding may tip a slate on another machine
    assert alike(raw, served(STANDARD.tolist(), standardise=False)) > 0.95  # another prior, other turns of exploration


def test_contexts_by_name_learn_like_contexts_with_standardised_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    # Without a first fold that measures them, features are taken to be as large as each other.
    monkeypatch.setattr(Groups, "measured", lambda widths, _: Groups.alike(widths))
    named = served(by_name(RAW.tolist()), features=DECLARED)
    beforehand = named.last.prepared(RAW)
    assert np.array_equal(beforehand[:, 2:], RAW[:, 2:])  # marks stay as they are
    assert alike(named, served(by_name(beforehand.tolist()), features=DECLARED, standardise=False)) > 0.99
