"""The judge finds what it is there for: one change to good evidence, one finding."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from tests.kafka.hostile.judge import Judge
from tests.kafka.hostile.ledger import Ledger, Sent
from tests.kafka.hostile.oracle import TOPICS, Raw, displays_of, displays_of_session
from tests.kafka.hostile.plan import WEIGHTS, make_plan

Evidence = dict[str, list[Raw]]

ARRIVAL = {"session_id": "s", "occurred_at": 1_000, "context": [1.0, 2.0, 3.0]}
CLICK = {"session_id": "s", "occurred_at": 2_000, "position": 2, "arm": "ad-1", "clicked": True}
OPENED = {
    "kind": "opened",
    "session_id": "s",
    "arrived_at": 1_000,
    "context": [1.0, 2.0, 3.0],
    "slate": ["ad-0", "ad-1"],
}
UNCERTAIN = {**OPENED, "uncertain": True}
DECISION = {"session_id": "s", "arrived_at": 1_000, "arm": "ad-0", "slate": ["ad-0", "ad-1"]}
PROGRESS = {"kind": "progress", "partition": 0, "partitions": 1, "time": 12_000}
EPISODE = {
    "version": 1,
    "window_start": 0,
    "window_end": 5_000,
    "sessions": 1,
    "displays": 2,
    "clicks": 1,
    "frozen": False,
}
FIRST = {"version": 0, "sha256": "a", "parent_sha256": None, "journal_offset": -1, "observations": 0}
SECOND = {"version": 1, "sha256": "b", "parent_sha256": "a", "journal_offset": 2, "observations": 2}
GARBAGE = b"garbage"
MISMATCH = {"adcascade.offset": b"0", "adcascade.reason": b"arm-mismatch"}
HEADERS = {"adcascade.topic": b"x.arrivals", "adcascade.partition": b"0", "adcascade.offset": b"1"}


def raw(offset: int, value: Any, **headers: bytes) -> Raw:
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    return Raw(0, offset, 0, b"s", data, hashlib.sha256(data).digest(), dict(headers))


def dead(offset: bytes = b"1", reason: bytes = b"undecodable") -> Raw:
    headers = {**HEADERS, "adcascade.offset": offset, "adcascade.reason": reason, "adcascade.error": b""}
    return raw(0, GARBAGE, **headers)


@pytest.fixture
def evidence() -> Evidence:
    bodies: dict[str, list[Any]] = {
        "arrivals": [ARRIVAL, GARBAGE],
        "clicks": [CLICK],
        "decisions": [DECISION],
        "journal": [OPENED, {"kind": "feedback", **CLICK}, PROGRESS],
        "parameters": [FIRST, SECOND],
        "episodes": [EPISODE],
    }
    made = {name: [raw(offset, body) for offset, body in enumerate(bodies.get(name, []))] for name in TOPICS}
    return {**made, "dead-letters": [dead()]}


@pytest.fixture
def ledger() -> Ledger:
    made = Ledger()
    arrival, click = (json.dumps(body).encode() for body in (ARRIVAL, CLICK))
    made.add("arrivals", b"s", arrival, Sent("arrivals", frozenset(), "arrival", ARRIVAL, acknowledged=1_100))
    made.add("clicks", b"s", click, Sent("clicks", frozenset(), "feedback", CLICK, acknowledged=2_100))
    made.add("arrivals", b"s", GARBAGE, Sent("arrivals", frozenset({"undecodable"}), "garbage", acknowledged=1_100))
    return made


def test_good_evidence_has_no_findings(evidence: Evidence, ledger: Ledger) -> None:
    assert Judge(evidence, ledger).findings() == []


def test_an_uncertain_session_is_counted_without_its_displays(evidence: Evidence, ledger: Ledger) -> None:
    evidence["journal"][0] = raw(0, UNCERTAIN)
    evidence["episodes"][0] = raw(0, {**EPISODE, "displays": 0, "clicks": 0})
    evidence["parameters"][1] = raw(1, {**SECOND, "observations": 0})
    evidence["dead-letters"].append(raw(0, b"", **{**dead().headers, "adcascade.topic": b"x.clicks", **MISMATCH}))
    assert Judge(evidence, ledger).findings() == []


def change(topic: str, place: int, **fields: Any) -> Callable[[Evidence], None]:
    def apply(evidence: Evidence) -> None:
        evidence[topic][place] = raw(evidence[topic][place].offset, {**evidence[topic][place].body, **fields})

    return apply


def drop(topic: str, place: int) -> Callable[[Evidence], None]:
    return lambda evidence: [evidence[topic].pop(place)].clear()


def add(topic: str, record: Raw) -> Callable[[Evidence], None]:
    return lambda evidence: evidence[topic].append(record)


@pytest.mark.parametrize(
    ("defect", "finding"),
    [
        (drop("arrivals", 1), "the broker has lost a record"),
        (drop("decisions", 0), "no decision for"),
        (change("decisions", 0, slate=["ad-9"], arm="ad-9"), "a wrong decision"),
        (drop("journal", 0), "the journal lacks the arrival"),
        (drop("journal", 1), "the journal lacks the feedback"),
        (add("journal", raw(9, {**OPENED, "session_id": "t"})), "arrival that nobody sent"),
        (change("journal", 1, position=1, arm="ad-0"), "feedback that nobody sent"),
        (drop("dead-letters", 0), "no dead letter for garbage"),
        (add("dead-letters", dead(b"0")), "a valid record is a dead letter"),
        (add("dead-letters", dead(reason=b"norm")), "is a dead letter for norm"),
        (change("episodes", 0, displays=1), "expected {'sessions': 1, 'displays': 2, 'clicks': 1}"),
        (change("parameters", 1, observations=4), "has 4 observations, expected 2"),
        (change("journal", 2, time=11_999), "closed before its time"),
        (add("parameters", raw(2, {**SECOND, "beta": 3})), "has two contents; they differ in beta"),
        (change("parameters", 1, parent_sha256="x"), "does not continue version 0"),
        (change("parameters", 1, journal_offset=0), "was not counted"),
        (drop("episodes", 0), "is in no window"),
    ],
)
def test_a_defect_is_found(
    evidence: Evidence, ledger: Ledger, defect: Callable[[Evidence], None], finding: str
) -> None:
    spoilt = copy.copy(evidence)
    defect(spoilt)
    assert finding in "\n".join(Judge(spoilt, ledger).findings())


def test_a_seed_gives_one_plan_with_every_kind_of_act() -> None:
    plan = make_plan(7, 65.0, list(WEIGHTS))
    assert plan == make_plan(7, 65.0, list(WEIGHTS)) != make_plan(8, 65.0, list(WEIGHTS))
    assert {act.kind for act in plan.acts} == set(WEIGHTS)
    assert all(before.at < act.at < plan.seconds for before, act in pairwise(plan.acts))


def test_the_join_of_a_slate_with_answers() -> None:
    slate = ("a", "b", "c")
    assert displays_of(slate, []) == {(1, "a", None)}
    assert displays_of(slate, [(5, 2, "b", False)]) == {(1, "a", False), (2, "b", False), (3, "c", None)}
    assert displays_of(slate, [(5, 2, "b", True), (6, 3, "c", False)]) == {(1, "a", False), (2, "b", True)}
    assert displays_of(slate, [(5, 1, "b", True)]) == {(1, "a", None)}


def test_no_display_of_an_uncertain_session_counts() -> None:
    one, other, marked = (json.dumps(fact) for fact in (OPENED, {**OPENED, "slate": ["ad-1"]}, UNCERTAIN))
    answers = [(2_000, 1, "ad-0", True)]
    assert displays_of_session([one], answers) == {(1, "ad-0", True)}
    assert displays_of_session([one, other], answers) == displays_of_session([marked], answers) == set()
