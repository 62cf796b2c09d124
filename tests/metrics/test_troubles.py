"""Troubles: what is active, what goes to the log, and how both are shown."""

from __future__ import annotations

import logging
from collections import Counter

import pytest

from worker.http.pages import operations
from worker.metrics.observer import Metrics
from worker.metrics.troubles import ACTIVE, BETWEEN_LINES, TroubleLog
from worker.stream.topology import Emits, Tally
from worker.stream.troubles import LONGEST_EXAMPLE, TROUBLES, Troubles
from worker.web.status import problems


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def names(troubles: TroubleLog) -> list[str]:
    return [active.name for active in troubles.active()]


def test_a_report_is_active_for_a_while(clock):
    troubles = TroubleLog(clock)
    troubles.add("too-large-output", "arrivals, partition 1, offset 7")
    clock.now = ACTIVE
    assert names(troubles) == ["too-large-output"]
    clock.now = ACTIVE + 1
    assert names(troubles) == []


def test_some_kinds_need_several_reports(clock, caplog):
    troubles, least = TroubleLog(clock), TROUBLES["wrong-key"].least
    troubles.add("wrong-key", "no key", least - 1)
    assert names(troubles) == []
    assert not caplog.records
    clock.now = 30
    troubles.add("wrong-key", "no key")
    assert names(troubles) == ["wrong-key"]
    assert f"wrong-key ({least} times)" in caplog.text


def test_the_log_has_one_line_a_minute_with_an_example(clock, caplog):
    troubles = TroubleLog(clock)
    for second in range(int(2 * BETWEEN_LINES) + 1):
        clock.now = float(second)
        troubles.add("too-large-output", f"offset {second}")
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 3
    assert "offset 0" in caplog.messages[0]
    assert "(60 times)" in caplog.messages[1]
    assert TROUBLES["too-large-output"].remedy in caplog.messages[2]


def test_lasting_trouble_is_active_until_it_is_over(clock, caplog):
    caplog.set_level(logging.INFO)
    troubles = TroubleLog(clock)
    for _ in range(5):
        troubles.set("learner-down", "ended with 1")
        clock.now += 10 * ACTIVE
    assert names(troubles) == ["learner-down"]
    troubles.clear("learner-down")
    troubles.clear("learner-down")
    assert names(troubles) == []
    assert caplog.messages[-1] == "trouble is over: learner-down"
    assert len(caplog.messages) == 6


# ── shares ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def batch(troubles: TroubleLog, kind: str, bad: int, **counts: int) -> None:
    """Report a batch with so many reports of a kind."""
    tally = Tally(**counts)
    if bad:
        tally.troubles.add(kind, "the last one", bad)
    troubles.observe(tally)


@pytest.mark.parametrize(
    ("kind", "counts", "normal", "trouble"),
    [
        ("dead-letters", {"arrivals": 400, "feedback": 600}, 10, 11),
        ("late-arrivals", {"arrivals": 100}, 5, 6),
        ("late-feedback", {"arrivals": 1000, "feedback": 100}, 5, 6),
        ("late-feedback", {"arrivals": 1000, "feedback": 3}, 2, 3),
        ("unanswered", {"ended": Counter(expired=80, clicked=20, empty=900)}, 75, 76),
    ],
)
def test_what_happens_now_and_then_is_trouble_only_above_a_share(clock, caplog, kind, counts, normal, trouble):
    healthy = TroubleLog(clock)
    batch(healthy, kind, normal, **counts)
    assert names(healthy) == []
    assert not caplog.records
    troubles = TroubleLog(clock)
    batch(troubles, kind, trouble, **counts)
    (active,) = troubles.active()
    assert active.name == kind
    assert active.detail.startswith(f"{trouble} of {active.out_of:,} {active.kind.of}")
    assert "For example: the last one." in active.sentence
    assert caplog.messages == [f"trouble {kind} ({trouble} times): {active.sentence}"]


def test_a_share_is_of_the_last_minutes(clock):
    troubles = TroubleLog(clock)
    batch(troubles, "dead-letters", 0, arrivals=100_000)
    clock.now = ACTIVE + 1
    batch(troubles, "dead-letters", 5, arrivals=100)
    assert names(troubles) == ["dead-letters"]
    clock.now += ACTIVE / 2
    batch(troubles, "dead-letters", 0, arrivals=900)
    assert names(troubles) == []


# ── showing ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_example_cannot_forge_a_line_of_the_log(clock, caplog):
    TroubleLog(clock).add("too-large-output", "x\nERROR all is lost\x1b[2J")
    assert "x?ERROR all is lost?[2J." in caplog.messages[0]


def test_bad_trouble_comes_first_and_everybody_shows_it():
    metrics, batch = Metrics(), Troubles()
    batch.add("too-large-output", "x" * 1000)
    batch.add("split-sessions", "session s")
    emits = Emits()
    emits.tally.troubles.update(batch)
    metrics.batches([emits], 1, 0.0)
    value = metrics.registry.get_sample_value
    assert value("adcascade_trouble", {"kind": "too-large-output", "level": "warn"}) == 1
    assert value("adcascade_trouble", {"kind": "clock", "level": "bad"}) == 0
    shown = [one for one in problems(metrics.snapshot(), None) if "kind" in one]
    assert [(one["kind"], one["level"]) for one in shown] == [("split-sessions", "bad"), ("too-large-output", "warn")]
    assert len(shown[1]["detail"]) < LONGEST_EXAMPLE + 30
    ready = operations(metrics.registry, lambda: None, metrics.trouble_lines)["/readyz"]({})
    assert ready.status == 200
    assert ready.body.startswith(b"ready, but there is trouble:\n- split-sessions: ")
    failed = operations(metrics.registry, lambda: "it has failed", metrics.trouble_lines)["/readyz"]({})
    assert failed.status == 503
    assert failed.body.startswith(b"not ready: it has failed\n- split-sessions: ")
