"""The clock of a worker beside the clock of the broker and the times of records."""

from __future__ import annotations

import pytest

from worker.runtime.clock import UNCONFIRMED, ComparedClock, clock_of, steady_clock
from worker.stream.decoding import MAX_PROGRESS_LEAD

START = 1_700_000_000_000
HOUR = 3_600_000


class Machine:
    """A machine whose clock can be set; `passed` is the true time since the start."""

    def __init__(self, *, most: int = MAX_PROGRESS_LEAD) -> None:
        self.passed = self.error = 0
        self.reports: list[str] = []
        self.clock = ComparedClock(
            lambda: self.true + self.error, most=most, report=self.reports.append, steady=lambda: self.passed
        )

    @property
    def true(self) -> int:
        return START + self.passed


def test_a_clock_that_agrees_with_its_reference_counts() -> None:
    machine = Machine()
    for machine.error in (0, 60_000, -60_000):
        machine.passed += 1000
        assert machine.clock.earlier() == machine.clock() == machine.true + machine.error
    assert not any(machine.reports)


@pytest.mark.parametrize("stamped", [True, False])
@pytest.mark.parametrize("error", [HOUR, -HOUR, 60_001])
def test_progress_takes_the_earlier_of_two_times_and_the_future_the_later(stamped: bool, error: int) -> None:
    machine = Machine()
    machine.passed = 5000
    if stamped:
        machine.clock.confirm(machine.true, written_at=machine.true)
    machine.passed, machine.error = 9000, error
    assert machine.clock.earlier() == machine.true + min(0, error)
    assert machine.clock.later() == machine.true + max(0, error)
    assert f"{abs(error) // 1000} s {'ahead' if error > 0 else 'behind'}" in machine.reports[-1]
    machine.error = 0
    assert machine.clock.earlier() == machine.true
    assert machine.reports[-1] == ""


def test_the_broker_corrects_a_clock_that_was_wrong_from_the_start() -> None:
    machine = Machine()
    machine.error = HOUR
    machine.clock = ComparedClock(
        lambda: machine.true + machine.error, report=machine.reports.append, steady=lambda: machine.passed
    )
    written = machine.clock.earlier()
    assert written == machine.true + HOUR, "nothing shows it yet"
    assert not machine.clock.confirm(machine.true, written_at=written), "the learner refuses it"
    assert machine.clock.earlier() == machine.true
    assert machine.clock.confirm(machine.true, written_at=machine.true + MAX_PROGRESS_LEAD)
    bounded = Machine(most=HOUR)
    bounded.error = MAX_PROGRESS_LEAD + 1
    assert bounded.clock.earlier() == bounded.true, "never above what the learner accepts"


def test_a_correction_of_the_clock_is_believed_once_a_record_agrees_with_it() -> None:
    machine = Machine()
    machine.error = HOUR
    machine.clock.witness([machine.true, machine.true + 2 * HOUR])  # an hour ago and in an hour, as the clock has it
    assert machine.clock.earlier() == machine.true
    machine.clock.witness([machine.true + HOUR - 500, 0])
    assert machine.clock.earlier() == machine.true + HOUR
    assert machine.reports[-1] == ""


def test_records_confirm_nothing_where_the_broker_sets_the_time() -> None:
    machine = Machine()
    machine.clock.confirm(machine.true, written_at=machine.true)
    machine.error = HOUR
    machine.clock.witness([machine.true + HOUR])
    assert machine.clock.earlier() == machine.true


def test_a_clock_that_starts_behind_rejects_only_what_is_hours_ahead_of_it() -> None:
    machine = Machine()
    machine.clock.witness([machine.true + HOUR, machine.true + 2 * HOUR])
    assert machine.clock.latest() == machine.true + UNCONFIRMED
    assert machine.clock.earlier() == machine.true
    machine.clock.witness([machine.true + 2 * HOUR, machine.true - 50_000])
    assert machine.clock.latest() == machine.clock.later() == machine.true
    machine.clock.witness([machine.true + HOUR])
    assert machine.clock.latest() == machine.true, "one record alone proves nothing against a confirmed clock"
    stamped = Machine()
    stamped.clock.confirm(stamped.true + HOUR, written_at=stamped.true)
    assert stamped.clock.latest() == stamped.true + HOUR


def test_a_suspended_machine_continues_at_the_present_time() -> None:
    machine = Machine()
    machine.clock.confirm(machine.true, written_at=machine.true)
    machine.passed += 10 * HOUR
    assert machine.clock.earlier() == machine.clock.later() == machine.true
    assert machine.reports == [""]


def test_the_clock_of_tests_is_a_file(tmp_path) -> None:
    file = tmp_path / "clock"
    file.write_text("1234", encoding="ascii")
    assert clock_of(str(file))() == 1234
    assert clock_of(None)() > 1_700_000_000_000
    assert steady_clock() <= steady_clock()
