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


def measured(*rounds: dict[str, float]) -> dict[str, Figure]:
    """Return the figures of rounds with these waits; two rounds at least."""
    rounds = rounds if len(rounds) > 1 else rounds * 2
    played = []

    def play(kind: str, rates: Sequence[Rate]) -> list[LiveRun]:
        played.append(kind)
        return [run(rounds[(len(played) - 1) // 3][kind]) for _ in rates]

    figures = [one for one in measure_rates(play, rounds=len(rounds)) if isinstance(one, Figure)]
    assert played == ["raw", "agent", "worker"] * len(rounds), "in turn"
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


def test_one_round_of_three_in_which_the_worker_does_not_keep_up_is_its_slowest() -> None:
    good = {"raw": 4.0, "agent": 10.0, "worker": 6.0}
    figures = measured(good, {**good, "worker": 500.0}, {**good, "worker": 8.0})
    figure = figures["(c) at 5,000 arrivals/s"]
    assert figure.value == pytest.approx(8.0)
    assert figure.detail.endswith("medians of 3 rounds, in 1 of which it did not keep up")
    assert figures["(c) / (a) at 200 arrivals/s, p50"].value == pytest.approx(2.0)


def test_the_rates_are_those_that_users_have() -> None:
    assert [rate.arrivals for rate in RATES] == [20, 200, 1_000, 5_000]
