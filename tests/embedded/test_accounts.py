"""The figures per ad equal a count from the raw records, through orders, freezing and restarts."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import orjson
import pytest

from tests.counting import Counted, count_ads
from tests.embedded.traffic import ARMS, SECOND, START, arrivals, deliver, finish, restart_learner, settings
from worker.embedded.runner import Embedded
from worker.stream import accounts
from worker.stream.accounts import Sums
from worker.stream.events import ArmChange, Command, Order
from worker.stream.parameters import Parameters
from worker.stream.topology import Record

DAY = 40 * SECOND
#: One before every part of a run but the first.
ORDERS: tuple[Order, ...] = (
    ArmChange(arm="ad-0", reward=7.5, active=True),
    ArmChange(arm="ad--2", reward=2.0, active=True),  # clicked as ad-2 is
    Command(action="freeze"),
    ArmChange(arm="ad-1", reward=ARMS[1].reward, active=False),
    Command(action="unfreeze"),
)


class Raw:
    """The records of a run by topic."""

    def __init__(self) -> None:
        self.log: dict[str, list[dict[str, Any]]] = defaultdict(list)

    def __call__(self, record: Record, _: object) -> None:
        self.log[record.topic].append(orjson.loads(record.value or b"null"))

    def count(self, newest: Parameters, start: int = 0) -> Counted:
        until = newest.window_end or 0
        return count_ads(self.log, timeout=newest.settings.session_timeout, start=start, until=until)

    @property
    def opened(self) -> dict[str, dict[str, Any]]:
        return {fact["session_id"]: fact for fact in self.log["ads.journal"] if fact["kind"] == "opened"}


def assert_equal(sums: Sums, counted: Counted, newest: Parameters) -> None:
    assert sums.sessions == len(counted.sessions)
    for arm, (*column, _) in zip(newest.arms, sums.of(len(newest.arms)).T.tolist(), strict=True):
        assert column == pytest.approx(counted.ads[arm.arm], rel=1e-12)


@pytest.mark.parametrize("partitions", [1, 4])
def test_figures_per_ad_equal_a_count_of_the_raw_records_through_orders_and_restarts(
    partitions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accounts, "DAY", DAY)
    raw, sent = Raw(), arrivals(400, seconds=90)
    runner = Embedded(settings(), ARMS, partitions=partitions, tap=raw)
    for part, order in enumerate((None, *ORDERS)):
        if order is not None:
            restart_learner(runner, settings(), enumerate(map(orjson.dumps, raw.log["ads.journal"])))
            runner.order(order)
        deliver(runner, [one for one in sent if (one.at - START) // (15 * SECOND) == part], live=True)
        if part == len(ORDERS):
            finish(runner)
        newest = runner.versions.newest
        assert_equal(newest.accounts.total, raw.count(newest), newest)
    total, day, counted = newest.accounts.total, newest.accounts.day, raw.count(newest)
    assert total.sessions == 400
    assert day > START // DAY  # it has changed
    assert_equal(newest.accounts.today, raw.count(newest, start=day * DAY), newest)
    modes = [mode for name, fact in raw.opened.items() for mode in fact["modes"][: counted.sessions[name]]]
    assert 0 < total.ads[4].sum() == sum(mode != "exploit" for mode in modes) < len(modes) == total.ads[0].sum()
