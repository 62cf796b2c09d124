"""The figures of live traffic as a client sees it, without a broker."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from worker.bench.figures import Figure
from worker.bench.kafka.live import LiveRun
from worker.bench.kafka.rates import FIGURES, RATES, Rate, measure_rates
from worker.bench.kafka.sender import SentTicks
from worker.errors import FailedError

SECOND = 1_000_000_000


def run(wait: float) -> LiveRun:
    """Return a run of ten seconds in which every client waits so many milliseconds, but longer during the warm-up."""
    times = [SECOND * second for second in range(10)]
    sent = SentTicks(times=times, events=list(range(1, 11)), sessions=list(range(1, 11)))
    waits = [int(1e6 * (999 if time <= SECOND else wait)) for time in times]
    answered = [a + b for a, b in zip(times, waits, strict=True)]
    return LiveRun(sent=sent, sessions=list(range(10)), times=answered, processor=wait / 200)


def measured(waits: dict[str, float]) -> dict[str, Figure]:
    played = []

    def play(kind: str, rates: Sequence[Rate]) -> list[LiveRun]:
        played.append(kind)
        return [run(waits[kind]) for _ in rates]

    figures = [one for one in measure_rates(play, rounds=2) if isinstance(one, Figure)]
    assert played == ["raw", "agent", "worker"] * 2, "in turn"
    assert len(figures) == FIGURES
    return {one.name: one for one in figures}


def test_the_worker_is_compared_with_both_at_every_rate() -> None:
    figures = measured({"raw": 4.0, "agent": 10.0, "worker": 6.0})
    assert figures["(c) at 20 arrivals/s"].value == pytest.approx(6.0)
    assert figures["(c) / (a) at 20 arrivals/s, p50"].value == pytest.approx(1.5)
    assert figures["(c) / (b) at 1,000 arrivals/s, p50"].value == pytest.approx(0.6)
    assert figures["(c) at 5,000 arrivals/s, p99"].value == pytest.approx(6.0)


def test_the_processor_time_is_that_of_a_tick_of_the_client() -> None:
    figure = measured({"raw": 4.0, "agent": 300.0, "worker": 6.0})["(c) at 200 arrivals/s, processor time"]
    assert figure.value == pytest.approx(3.0)
    assert "a tick of 1.0 records" in (figure.detail or "")
    assert "(a) 2.00 ms" in (figure.detail or "")
    assert "(b)" not in (figure.detail or ""), "no measurement where it did not keep up"


def test_an_agent_that_does_not_keep_up_is_reported_and_not_compared() -> None:
    figures = measured({"raw": 4.0, "agent": 300.0, "worker": 6.0})
    assert "does not keep up" in (figures["(b) at 200 arrivals/s"].detail or "")
    assert "does not keep up" in (figures["(c) / (b) at 200 arrivals/s, p50"].detail or "")


def test_a_worker_that_does_not_keep_up_is_no_measurement() -> None:
    with pytest.raises(FailedError, match="does not keep up at 20"):
        measured({"raw": 4.0, "agent": 10.0, "worker": 500.0})


def test_the_rates_are_those_that_users_have() -> None:
    assert [rate.arrivals for rate in RATES] == [20, 200, 1_000, 5_000]
