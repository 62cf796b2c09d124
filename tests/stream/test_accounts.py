"""The accounts of ads: what counts, what leaves them as they are, and the words for ads that do badly."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pytest

from tests.stream.scenes import ADDITIVE, feedback, opened, progress, written
from worker.bandit.additive import AdditiveModel
from worker.bandit.answers import AnswerCounts
from worker.errors import ParametersError
from worker.stream import folding
from worker.stream.accounts import NOTHING, ROWS, Accounts, Sums
from worker.stream.ad_figures import AdTable, document
from worker.stream.events import ArmChange, Command, Import, JournalEvent
from worker.stream.learner import REPUBLISH, Learner
from worker.stream.parameters import Parameters, decode_parameters
from worker.stream.settings import Arm, LearningSettings
from worker.stream.version_records import encode_parameters, parameters_document

# A window of a second is closed 350 ms after its end.
SETTINGS = LearningSettings(dim=2, horizon=3, window=1000, session_timeout=300, lateness=50, warmup=0, **ADDITIVE)
ARMS = (Arm(arm="a", reward=1.0), Arm(arm="b", reward=2.0), Arm(arm="c", reward=3.0))


def session(name: str, at: int, **more: Any) -> list[JournalEvent]:
    """Return a session that passes over a and clicks b, which explores."""
    modes = ("exploit", "explore", "exploit")
    return [opened(name, at, **{"modes": modes, **more}), feedback(2, "b", True, at + 20, name)]


def learned(*events: JournalEvent) -> Learner:
    learner = Learner(SETTINGS, ARMS)
    learner.handle(written(events))
    return learner


def sums(accounts: Accounts) -> dict[str, list[float]]:
    return dict(zip(ROWS, accounts.total.of(3).tolist(), strict=True))


ONE = {
    "displays": [1.0, 1.0, 0.0],
    "clicks": [0.0, 1.0, 0.0],
    "revenue": [0.0, 2.0, 0.0],
    "answered": [1.0, 1.0, 0.0],
    "explored": [0.0, 1.0, 0.0],
}


# ── counting ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_session_counts_its_answered_displays_and_the_one_after_them() -> None:
    assert sums(learned(*session("s", 10), progress(1350)).current.accounts) == ONE
    left = learned(opened("s", 10, modes=("random",) * 3), feedback(1, "a", False, 20), progress(1350))
    counted = sums(left.current.accounts)
    assert (counted["displays"], counted["answered"]) == ([1, 1, 0], [1, 0, 0])
    assert (counted["clicks"], counted["explored"]) == ([0, 0, 0], [1, 1, 0])


def test_an_uncertain_session_counts_as_a_session_only() -> None:
    accounts = learned(*session("s", 10), *session("u", 20, uncertain=True), progress(1350)).current.accounts
    assert (accounts.total.sessions, sums(accounts)) == (2, ONE)


@pytest.mark.parametrize("why", ["frozen", "rejected"])
def test_windows_count_while_learning_is_frozen_or_rejected_and_are_published_with_the_position(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[JournalEvent] = [Command(action="freeze")] if why == "frozen" else []
    if why == "rejected":
        monkeypatch.setattr(folding, "confidence_radius", lambda *_, **__: float("nan"))
    for number in range(REPUBLISH):
        events += [*session(f"s{number}", 1000 * number), progress(1000 * number + 1350)]
    learner = Learner(SETTINGS, ARMS)
    versions = learner.handle(written(events)).versions
    assert learner.current.folds == 0
    assert versions[-1].accounts.total.sessions == REPUBLISH
    assert sums(versions[-1].accounts)["revenue"] == [0.0, 2.0 * REPUBLISH, 0.0]
    for known in range(len(versions)):
        again = Learner(SETTINGS, ARMS, versions[: known + 1])
        again.handle(written(events))
        assert again.current.accounts == versions[-1].accounts


def test_orders_leave_the_accounts_as_they_are() -> None:
    before = learned(*session("s", 10), progress(1350))
    other = parameters_document(replace(before.current, accounts=Accounts(total=Sums(sessions=99)), version=7, folds=4))
    orders = (
        Command(action="rollback", version=0),
        ArmChange(arm="d", reward=9.0, active=True),
        ArmChange(arm="b", reward=9.0, active=True),
        Import(parameters=other, arms=False),
    )
    learner = learned(*session("s", 10), progress(1350), *orders, *session("t", 1010), progress(2350))
    assert learner.current.version == 1 + len(orders) + 1
    # The session was served by version 0.
    assert sums(learner.current.accounts) == {name: [2 * value for value in row] for name, row in ONE.items()}
    assert document(learner.current)["arms"][-1]["note"] == "new: 0 displays"


def test_sums_that_leave_the_floating_point_range_stop_nothing() -> None:
    huge = ArmChange(arm="b", reward=1.7e308, active=True)
    events = [huge, *(event for n in range(9) for event in session(f"s{n}", n, share=1e-300, parameters_version=1))]
    learner = learned(*events, progress(1350))
    again = decode_parameters(encode_parameters(learner.current))
    assert again.accounts == learner.current.accounts != NOTHING
    orjson.dumps(document(again))


# ── the record ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_hash_does_not_cover_accounts_and_the_record_has_them() -> None:
    version = learned(*session("s", 10), progress(1350)).current
    bare = replace(version, accounts=NOTHING)
    assert bare.sha256 == version.sha256
    assert "accounts" not in parameters_document(bare)
    assert decode_parameters(encode_parameters(version)).accounts == version.accounts


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        ({"total": "!"}, "accounts are damaged"),
        ({"total": "AAAA"}, "accounts are damaged"),
        ({"today": "AAAAAAAA8D8="}, "accounts are damaged"),
        ({"total": "AAAAAAAA8L8" * 5}, "accounts are damaged"),
        ({"sessions": -1}, "accounts.sessions"),
        ({"day": None}, "accounts.day"),
    ],
)
def test_damaged_accounts_are_refused(damage: dict[str, Any], says: str) -> None:
    record = parameters_document(learned(*session("s", 10), progress(1350)).current)
    record["accounts"] |= damage
    with pytest.raises(ParametersError, match=says):
        decode_parameters(orjson.dumps(record))


def test_accounts_of_more_ads_than_the_catalogue_has_are_refused() -> None:
    sums = Sums(sessions=1, ads=np.zeros((len(ROWS), 4)))
    version = replace(Parameters.first(SETTINGS, ARMS), accounts=Accounts(total=sums))
    with pytest.raises(ParametersError, match="more ads than the 3 of the catalogue"):
        decode_parameters(encode_parameters(version))


# ── words ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def version_of(
    displays: list[float], clicks: list[float], *, rewards: list[float] | None = None, retired: int | None = None
) -> Parameters:
    """Return a version with such accounts; every click earned the reward of its ad."""
    prices = rewards or [1.0] * len(displays)
    arms = tuple(Arm(arm=f"ad-{k}", reward=price, active=k != retired) for k, price in enumerate(prices))
    ads = np.array([displays, clicks, np.multiply(clicks, prices), displays, np.zeros(len(displays))])
    accounts = Accounts(total=Sums(sessions=10_000, ads=ads))
    return replace(Parameters.first(replace(SETTINGS, answers="learned"), arms), accounts=accounts)


def notes(version: Parameters) -> dict[str, str | None]:
    return {ad.arm.arm.removeprefix("ad-"): ad.note for ad in AdTable(version).ads()}


def test_an_ad_does_badly_if_its_displays_earn_little_and_the_note_says_why() -> None:
    version = version_of(
        [1000, 1000, 1000, 1000, 1000, 49, 60, 1000],
        [100, 110, 5, 100, 12, 0, 0, 0],
        # An ad that pays much and is rarely clicked does well; of one with few displays nothing is known.
        rewards=[1.0, 1.0, 1.0, 0.05, 9.0, 1.0, 1.0, 1.0],
        retired=7,
    )
    reasons = {"2": "hardly clicked", "3": "low revenue per display", "5": "new: 49 displays"}
    assert notes(version) == {**dict.fromkeys("01467"), **reasons}
    assert [ad.is_bad for ad in AdTable(version).ads()].count(True) == 2


def test_an_ad_that_is_hardly_ever_answered_says_so() -> None:
    version = version_of([500.0] * 14, [50.0] * 14)
    mute = np.arange(14) >= 2  # more than are named elsewhere
    counts = np.tile(np.full(14, 150.0), (3, 1))
    version = replace(
        version,
        arms=(*version.arms, *(Arm(arm=f"x{k}", reward=1.0) for k in range(14))),
        answers=AnswerCounts(displayed=np.hstack([counts, counts]), answered=np.hstack([counts * ~mute, counts])),
        model=AdditiveModel.certain(np.zeros(2), np.where(np.r_[mute, np.zeros(14, dtype=bool)], -8.0, -2.0)),
    )
    assert sum(note == "hardly ever answered" for note in notes(version).values()) == 12


def test_the_best_ads_are_shown_and_of_the_others_first_those_that_do_badly() -> None:
    version = version_of([1000] * 6 + [900, 10, 800], [90, 80, 70, 60, 50, 40, 1, 0, 2])
    best, worst = AdTable(version).best_and_worst(3)
    assert [ad.arm.arm for ad in best] == ["ad-0", "ad-1", "ad-2"]
    assert [(ad.arm.arm, ad.note) for ad in worst] == [
        ("ad-6", "hardly clicked"),
        ("ad-8", "hardly clicked"),
        ("ad-5", None),
    ]
