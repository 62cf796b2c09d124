"""The figures per ad equal a count from the raw records, through orders, freezing, disorder and restarts."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.counting import Counted, count_ads
from tests.embedded.traffic import ARMS, SECOND, START, Sent, arrivals, deliver, finish, settings
from worker.embedded.runner import Embedded
from worker.embedded.state import StateFolder
from worker.stream import accounts
from worker.stream.accounts import Sums
from worker.stream.events import ArmChange, Command, Order
from worker.stream.parameters import Parameters
from worker.stream.topology import Record

DAY = 40 * SECOND
ORDERS: tuple[Order, ...] = (
    ArmChange(arm="ad-0", reward=7.5, active=True),
    ArmChange(arm="ad--2", reward=2.0, active=True),  # clicked as ad-2 is
    Command(action="freeze"),
    ArmChange(arm="ad-1", reward=ARMS[1].reward, active=False),
    Command(action="unfreeze"),
)


class Raw:
    """The records of a run by topic, as documents; a version that comes again replaces the earlier one."""

    def __init__(self) -> None:
        self.records: dict[str, list[dict[str, Any]]] = defaultdict(list)

    def __call__(self, record: Record, _: object) -> None:
        if record.value:
            self.records[record.topic].append(orjson.loads(record.value))

    def count(self, newest: Parameters, start: int = 0) -> Counted:
        topics = (self.records[f"ads.{name}"] for name in ("arrivals", "decisions", "clicks", "parameters"))
        return count_ads(*topics, timeout=newest.settings.session_timeout, start=start, until=newest.window_end or 0)


def assert_equal(sums: Sums, counted: Counted, newest: Parameters) -> None:
    assert sums.sessions == counted.sessions
    for arm, column in zip(newest.arms, sums.of(len(newest.arms)).T.tolist(), strict=True):
        displays, clicks, revenue, answered, _ = column
        assert [displays, clicks, answered] == [counted.ads[arm.arm][place] for place in (0, 1, 3)]
        assert revenue == pytest.approx(counted.ads[arm.arm][2], rel=1e-12)


def exploring(raw: Raw, newest: Parameters) -> float:
    """Return the displays that explored, by the facts of the journal."""
    explored, displays = 0.0, 0.0
    for fact in {one["session_id"]: one for one in raw.records["ads.journal"] if one["kind"] == "opened"}.values():
        alone = Raw()
        alone.records = {**raw.records, "ads.arrivals": [{**fact, "occurred_at": fact["arrived_at"]}]}
        shown = sum(row[0] for row in alone.count(newest).ads.values())
        displays += shown
        explored += sum(mode != "exploit" for mode in fact["modes"][: int(shown)])
    assert 0 < explored < displays
    return explored


def rounds(sent: list[Sent]) -> list[list[Sent]]:
    """Return records in parts of 15 s."""
    ends = [START + (1 + part) * 15 * SECOND for part in range(len(ORDERS) + 1)]
    return [[one for one in sent if end - 15 * SECOND <= one.at < end] for end in ends]


@pytest.mark.parametrize("partitions", [1, 4])
def test_figures_per_ad_equal_a_count_of_the_raw_records_through_orders_and_restarts(
    tmp_path: Path, partitions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accounts, "DAY", DAY)
    raw = Raw()
    for part, (order, sent) in enumerate(zip((None, *ORDERS), rounds(arrivals(400, seconds=90)), strict=True)):
        # Every part is served by a new process, which has the state folder only.
        with StateFolder(tmp_path) as state:
            runner = Embedded(settings(), ARMS, partitions=partitions, state=state, tap=raw)
            if order is not None:
                runner.order(order)
            deliver(runner, sent, live=True)
            if part == len(ORDERS):
                finish(runner)
            newest = runner.versions.newest
            if newest.window_end:
                assert_equal(newest.accounts.total, raw.count(newest), newest)
    day = newest.accounts.day
    assert day > START // DAY  # it has changed
    assert_equal(newest.accounts.today, raw.count(newest, start=day * DAY), newest)
    assert newest.accounts.total.sessions == 400
    assert newest.accounts.total.ads[4].sum() == exploring(raw, newest)


def test_a_sampled_session_stands_for_several() -> None:
    raw = Raw()
    runner = Embedded(settings(learn_at_most=15), ARMS, partitions=2, tap=raw)
    deliver(runner, arrivals(300, seconds=60), live=True)
    finish(runner)
    newest = runner.versions.newest
    total, counted = newest.accounts.total, raw.count(newest)
    shares = {one["session_id"]: one.get("share", 1.0) for one in raw.records["ads.journal"] if one["kind"] == "opened"}
    assert len(shares) < total.sessions == counted.sessions == 300
    expected = 0.0
    for name, share in shares.items():
        alone = Raw()
        alone.records = {
            **raw.records,
            "ads.arrivals": [a for a in raw.records["ads.arrivals"] if a["session_id"] == name],
        }
        expected += sum(row[0] for row in alone.count(newest).ads.values()) / share
    assert total.ads[0].sum() == pytest.approx(expected, rel=1e-9)
    assert expected == pytest.approx(sum(row[0] for row in counted.ads.values()), rel=0.3)
