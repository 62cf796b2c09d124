"""Simulated users in real time, without a broker: a fake worker answers at once, with one slate for all."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import time_ns
from typing import Any

import numpy as np
import orjson
import pytest
from prometheus_client import generate_latest

from tests.client.fake import FakeTransport
from tests.stream.scenes import decision
from worker.client import UndeliveredError
from worker.simulation.traffic.client import run_traffic
from worker.simulation.traffic.generator import GRACE, MOST_BEHIND, NANOSECONDS, PERIOD, Traffic, TrafficSettings
from worker.simulation.traffic.report import LINE_EVERY, TrafficLines, summary, summary_rows, traffic_registry
from worker.simulation.users import Sent
from worker.simulation.worth import Valuer, Worth
from worker.stream.events import encode_event

START = 1_800_000_000_000 * NANOSECONDS
TIDY = TrafficSettings(duplicates=0.0, silence=0.0, poison=0.0, prefetching=0.0, look=(0, 0))
NAMES = [arm.arm for arm in TIDY.world().catalogue()]


def milliseconds(count: float) -> int:
    return round(count * NANOSECONDS)


#: When everybody in a crowd has arrived.
THERE = START + milliseconds(PERIOD)


def crowd(sessions: int, **changes: Any) -> Traffic:
    """Traffic whose sessions all arrive in the first period."""
    return Traffic(replace(TIDY, rate=40.0 * sessions, sessions=sessions, **changes), now=START)


def encoded(session_id: str, slate: Sequence[str], position: int = 1, tokens: Sequence[str] | None = None) -> bytes:
    return encode_event(decision(session_id, slate, position, tokens=None if tokens is None else tuple(tokens)))


def decisions(traffic: Traffic, slate: Sequence[str] = NAMES[:5]) -> list[bytes]:
    """Decide every session of a crowd."""
    return [encoded(record.key.decode(), slate) for record in traffic.due(THERE)]


class FakeWorker:
    """Serves the same slate to all; like the worker, it decides the next position after every pass."""

    def __init__(self, slate: Sequence[str] = NAMES[:5]) -> None:
        self.slate = slate
        self.records: list[dict[str, Any]] = []

    def answers(self, records: Sequence[Sent]) -> list[bytes]:
        values = []
        for record in records:
            event = orjson.loads(record.value)
            self.records.append(event)
            position = 1 if record.topic == "arrivals" else event["position"] + 1
            if not event.get("clicked", False) and position <= len(self.slate):
                values.append(encoded(event["session_id"], self.slate[position - 1 :], position))
        return values


def play(traffic: Traffic, worker: FakeWorker, *, step: float = 10, most: int = 100_000) -> int:
    """Let time pass until the traffic is finished; return the time."""
    now = START
    for _ in range(most):
        traffic.receive(worker.answers(traffic.due(now)), now + milliseconds(2))
        if traffic.finished:
            traffic.settle(now)
            return now
        now += milliseconds(step)
    raise AssertionError("the traffic does not end")


def feedback(worker: FakeWorker) -> dict[str, list[dict[str, Any]]]:
    by_session = defaultdict(list)
    for event in worker.records:
        if "clicked" in event:
            by_session[event["session_id"]].append(event)
    return by_session


# ── arrivals ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_users_arrive_at_their_rate_whether_they_are_served_or_not() -> None:
    traffic = Traffic(replace(TIDY, rate=200.0), now=START)
    came = [len(traffic.due(START + milliseconds(time))) for time in range(0, 10_000, 10)]
    assert 1_850 < sum(came) < 2_150
    assert max(came) < 30  # spread over time
    assert traffic.waiting == sum(came)


@pytest.mark.parametrize("rate", [300.0, 30_000.0])
def test_the_number_of_sessions_is_exact(rate: float) -> None:
    traffic = Traffic(replace(TIDY, rate=rate, sessions=777), now=START)
    worker = FakeWorker()
    play(traffic, worker)
    assert traffic.counts.sessions == traffic.counts.decided == 777
    assert len({event["session_id"] for event in worker.records}) == 777


def test_no_user_arrives_after_the_duration() -> None:
    traffic = Traffic(replace(TIDY, rate=100.0, duration=2_000), now=START)
    end = play(traffic, FakeWorker())
    assert 2_000 <= (end - START) / NANOSECONDS < 2_500
    assert 150 < traffic.counts.sessions < 250


def test_users_that_a_slow_process_missed_are_left_out() -> None:
    traffic = Traffic(replace(TIDY, rate=1_000.0), now=START)
    traffic.due(START)
    late = len(traffic.due(START + milliseconds(60_000)))
    assert late < 1.2 * MOST_BEHIND


# ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("prefetching", [0.0, 0.5])
def test_users_answer_every_position_once_up_to_a_click(prefetching: float) -> None:
    traffic = crowd(500, prefetching=prefetching)
    worker = FakeWorker()
    play(traffic, worker)
    clicks = 0
    for events in feedback(worker).values():
        positions = [event["position"] for event in events]
        assert positions == list(range(1, len(positions) + 1))
        assert [event["arm"] for event in events] == list(worker.slate[: len(events)])
        assert not any(event["clicked"] for event in events[:-1])
        clicks += events[-1]["clicked"]
    assert traffic.counts.clicks == clicks > 50
    assert traffic.forsaken == 0


def test_revenue_counts_each_click_once() -> None:
    traffic = crowd(400, duplicates=0.5)
    worker = FakeWorker()
    play(traffic, worker)
    rewards = {arm.arm: arm.reward for arm in traffic.settings.world().catalogue()}
    clicked = {name: events for name, events in feedback(worker).items() if any(e["clicked"] for e in events)}
    earned = sum(rewards[next(e["arm"] for e in events if e["clicked"])] for events in clicked.values())
    assert traffic.counts.earned == pytest.approx(earned)
    assert traffic.counts.clicks == len(clicked)
    assert traffic.counts.events > 1.3 * 400 * 2


def test_a_repeated_decision_is_not_answered_again() -> None:
    traffic = crowd(50)
    values = decisions(traffic)
    traffic.receive(values, THERE)
    sent = len(traffic.due(THERE))
    traffic.receive([*values, b"not a decision", None, encoded("somebody:1-1", NAMES[:5])], THERE)
    assert traffic.due(THERE + milliseconds(1)) == []
    assert traffic.counts.others == len(values) + 3
    assert sent == traffic.counts.decided == 50


@pytest.mark.parametrize("slate", [(), ("stranger",)])
def test_an_empty_slate_and_unknown_arms_are_worth_nothing(slate: tuple[str, ...]) -> None:
    traffic = crowd(30)
    traffic.receive(decisions(traffic, slate), THERE)
    assert traffic.finished is not bool(slate)  # an empty slate ends the session at once
    traffic.settle(START)
    assert traffic.worth.served == 0 < traffic.worth.oracle
    assert traffic.worth.sessions == 30


# ── no decisions ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_traffic_without_decisions_stalls() -> None:
    traffic = crowd(20)
    traffic.due(THERE)
    assert not traffic.stalled(START + milliseconds(GRACE))
    assert traffic.stalled(START + milliseconds(GRACE + 1))
    assert not traffic.finished


def test_sessions_without_a_decision_expire_and_are_counted() -> None:
    traffic = crowd(40)
    values = decisions(traffic)
    traffic.receive(values[:10], THERE)
    traffic.due(THERE + milliseconds(1))
    hanging = traffic.forsaken
    traffic.due(THERE + milliseconds(traffic.settings.patience + GRACE + 2))
    assert traffic.counts.sessions - traffic.counts.decided == 30
    assert traffic.counts.forsaken == hanging > 0
    assert traffic.finished


# ── worth ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("best", [True, False])
def test_the_best_slates_leave_no_regret_and_any_other_leaves_some(best: bool) -> None:
    traffic = crowd(300)
    events = [orjson.loads(record.value) for record in traffic.due(THERE)]
    valuer = Valuer(traffic.settings.world(), horizon=5, repeats=traffic.settings.repeats)
    slates = valuer.best_slates(np.array([event["context"] for event in events]))
    if not best:
        slates = np.roll(slates, 1, axis=0)  # each user gets the slate of another
    values = [encoded(e["session_id"], [NAMES[k] for k in slate]) for e, slate in zip(events, slates, strict=True)]
    traffic.receive(values, THERE)
    traffic.settle(THERE)
    worth = traffic.worth
    assert worth.sessions == 300
    assert (worth.regret == pytest.approx(0.0, abs=1e-9)) is best
    assert (worth.regret > 0.02 * worth.oracle) is not best


def test_latency_is_measured_from_sending_to_receiving() -> None:
    traffic = crowd(100)
    traffic.receive(decisions(traffic), THERE + milliseconds(40))
    assert traffic.latency(0.5) == traffic.latency(0.99) == pytest.approx(0.04, rel=0.02)


def test_the_summary_adds_up() -> None:
    traffic = crowd(200)
    play(traffic, FakeWorker())
    numbers = orjson.loads(orjson.dumps(summary(traffic, 2.0)))
    assert numbers["sessions"] == numbers["decided"] == 200
    assert numbers["undecided"] == 0
    assert numbers["finished"] is True
    assert numbers["pseudo_regret"]["total"] == pytest.approx(numbers["oracle_reward"] - numbers["served_reward"])
    assert numbers["parameters_version"] == 7
    assert sum(second.sessions for second in traffic.seconds) == traffic.worth.sessions == 200
    assert numbers["records"]["total"] == numbers["records"]["arrivals"] + numbers["records"]["clicks"]
    assert summary_rows(numbers)[0] == ("sessions", "200", "0 without a decision")
    assert summary_rows({**numbers, "forsaken": 3})[1][:2] == ("  forsaken", "3")


def test_traffic_without_sessions_has_a_summary() -> None:
    numbers = orjson.loads(orjson.dumps(summary(Traffic(TIDY, now=START), 0.0)))
    assert numbers["latency"] == {"p50": None, "p99": None, "mean": None, "longest": None}
    assert numbers["parameters_version"] is None
    assert summary_rows(numbers)


def test_metrics_have_what_only_the_truth_tells() -> None:
    traffic = crowd(100)
    play(traffic, FakeWorker())
    text = generate_latest(traffic_registry(traffic)).decode()
    series = {line.split()[0]: float(line.split()[1]) for line in text.splitlines() if line[:1] != "#"}
    assert series["adcascade_pseudo_regret_total"] == pytest.approx(traffic.worth.regret)
    assert series["adcascade_oracle_reward_total"] == pytest.approx(traffic.worth.oracle)
    assert len(series) == 2


def test_a_line_is_printed_every_few_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    traffic = crowd(20)
    traffic.due(THERE)
    traffic.seconds.append(Worth(sessions=3, oracle=2.0, served=1.0))
    lines = TrafficLines(traffic)
    for seconds in (0.0, LINE_EVERY - 1, LINE_EVERY, LINE_EVERY + 1):
        lines.show(seconds)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("  10 s  20 sessions, 20 records (2/s), 20 wait, ")
    assert line.endswith("decisions in – (p99 –), lately 50.0% of the oracle's revenue")


# ── sending ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def run_over(transport: FakeTransport, show: Callable[[], None]) -> Traffic:
    traffic = Traffic(replace(TIDY, rate=800.0, sessions=20), now=time_ns())
    asyncio.run(run_traffic(transport, traffic, stop=asyncio.Event(), show=show))
    return traffic


def test_traffic_runs_over_a_transport_until_every_user_has_been_answered() -> None:
    transport = FakeTransport(answers=())
    traffic = run_over(transport, lambda: None)
    assert traffic.counts.decided == len(transport.sent) == 20
    assert transport.stopped


def test_a_record_that_no_broker_accepts_ends_the_traffic() -> None:
    transport = FakeTransport(holds=True)
    with pytest.raises(UndeliveredError):
        run_over(transport, transport.fail)
    assert transport.stopped
