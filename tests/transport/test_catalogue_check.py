"""A catalogue file that differs from the published catalogue is reported until it does not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from worker.metrics.troubles import TroubleLog
from worker.runtime.watch import CatalogueCheck
from worker.stream.parameters import Parameters
from worker.stream.settings import Arm, LearningSettings

PUBLISHED = (Arm(arm="hat", reward=1.0), Arm(arm="shoe", reward=2.0), Arm(arm="old", reward=3.0, active=False))


def version(number: int, *arms: Arm) -> Parameters:
    return replace(Parameters.first(LearningSettings(dim=1), arms or PUBLISHED), version=number)


SEVENTH = version(7)


def active(troubles: TroubleLog) -> list[str]:
    return [trouble.name for trouble in troubles.active()]


def test_a_file_that_differs_is_reported_with_the_difference_until_a_version_has_its_arms(caplog) -> None:
    troubles = TroubleLog()
    wanted = (Arm(arm="shoe", reward=2.5), Arm(arm="coat", reward=4.0))
    check = CatalogueCheck(wanted, troubles)
    check.start(SEVENTH)
    (trouble,) = troubles.active()
    assert trouble.name == "catalogue-differs"
    assert "Against version 7" in trouble.sentence
    assert all(change in trouble.sentence for change in ("+ coat 4", "− hat 1", "~ shoe 2 → 2.5", "arms sync FILE"))
    assert "+ coat 4" in caplog.text
    check.again([version(8)])
    check.again([version(9, *PUBLISHED, wanted[1])])
    assert active(troubles) == ["catalogue-differs"]
    check.again([SEVENTH, version(10, replace(PUBLISHED[0], active=False), *wanted)])
    assert active(troubles) == []


@pytest.mark.parametrize("wanted", [(), PUBLISHED, PUBLISHED[:2]])
def test_the_same_active_arms_or_no_file_are_no_trouble_and_later_orders_are_none(wanted: tuple[Arm, ...]) -> None:
    troubles = TroubleLog()
    check = CatalogueCheck(wanted, troubles)
    check.start(SEVENTH)
    check.again([SEVENTH, version(8, *PUBLISHED[:1])])
    assert active(troubles) == []


def test_a_worker_that_starts_before_version_0_compares_with_it_when_it_is_published() -> None:
    troubles = TroubleLog()
    check = CatalogueCheck(PUBLISHED[:1], troubles)
    check.start(None)
    check.again([])
    assert active(troubles) == []
    check.again([version(0)])
    assert active(troubles) == ["catalogue-differs"]
    ordered = TroubleLog()
    check = CatalogueCheck(PUBLISHED, ordered)
    check.start(None)
    for _ in range(2):
        check.again([version(0), version(1, *PUBLISHED[:1])])
    assert active(ordered) == [], "an order right after it is no difference"


def test_a_large_difference_is_cut() -> None:
    many = tuple(Arm(arm=f"ad-{index}", reward=1.0) for index in range(1000))
    text = CatalogueCheck(many, TroubleLog()).difference(SEVENTH)
    assert "1000 added, 2 retired" in text
    assert "and 997 more" in text
    assert len(text) < 200
