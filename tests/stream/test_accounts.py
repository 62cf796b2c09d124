"""The accounts of ads: what counts, what leaves them as they are, and the words for ads that do badly."""

from __future__ import annotations

from base64 import b64encode
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
from worker.stream.accounts import NOTHING, Accounts, Sums
from worker.stream.ad_figures import all_figures, best_and_worst
from worker.stream.events import ArmChange, Command, Import, JournalEvent
from worker.stream.learner import REPUBLISH, Learner
from worker.stream.parameters import Parameters, decode_parameters
from worker.stream.settings import Arm, LearningSettings
from worker.stream.version_records import encode_parameters, parameters_document

# A window of a second is closed 350 ms after its end.
SETTINGS = LearningSettings(dim=2, horizon=3, window=1000, session_timeout=300, lateness=50, warmup=0, **ADDITIVE)
ARMS = (Arm(arm="a", reward=1.0), Arm(arm="b", reward=2.0), Arm(arm="c", reward=3.0))
#: The sums of a session: displays, clicks, revenue, answered and explored displays.
ONE = [[1, 1, 0], [0, 1, 0], [0, 2, 0], [1, 1, 0], [0, 1, 0]]


def session(name: str, at: int, **more: Any) -> list[JournalEvent]:
    """Return a session that passes over a and clicks b, which explores."""
    modes = ("exploit", "explore", "exploit")
    return [opened(name, at, modes=modes, **more), feedback(2, "b", True, at + 20, name)]


def learned(*events: JournalEvent) -> Parameters:
    learner = Learner(SETTINGS, ARMS)
    learner.handle(written(events))
    return learner.current


def test_an_uncertain_session_counts_as_a_session_only() -> None:
    total = learned(*session("s", 10), *session("u", 20, uncertain=True), progress(1350)).accounts.total
    assert (total.sessions, total.ads.tolist()) == (2, ONE)


@pytest.mark.parametrize("why", ["frozen", "rejected"])
def test_windows_count_while_learning_is_frozen_or_rejected(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[JournalEvent] = [Command(action="freeze")] if why == "frozen" else []
    if why == "rejected":
        monkeypatch.setattr(folding, "rounded", lambda *_, **__: 1 / 0)
    for number in range(REPUBLISH):
        events += [*session(f"s{number}", 1000 * number), progress(1000 * number + 1350)]
    versions = Learner(SETTINGS, ARMS).handle(written(events)).versions
    assert (versions[-1].folds, versions[-1].accounts.total.sessions) == (0, REPUBLISH)
    assert versions[-1].accounts.total.ads[2].tolist() == [0.0, 2.0 * REPUBLISH, 0.0]


def test_orders_leave_the_accounts_as_they_are() -> None:
    before = learned(*session("s", 10), progress(1350))
    other = parameters_document(replace(before, accounts=Accounts(total=Sums(sessions=99)), version=7, folds=4))
    orders = (
        Command(action="rollback", version=0),
        ArmChange(arm="d", reward=9.0, active=True),
        ArmChange(arm="b", reward=9.0, active=True),
        Import(parameters=other, arms=False),
    )
    after = learned(*session("s", 10), progress(1350), *orders, *session("t", 1010), progress(2350))
    assert after.version == 1 + len(orders) + 1
    assert replace(after, accounts=NOTHING).sha256 == after.sha256
    # Both sessions were served by version 0, with its prices.
    assert after.accounts.total.of(3).tolist() == np.multiply(2, ONE).tolist()
    assert all_figures(after)["arms"][-1]["note"] == "new: 0 displays"


def test_sums_that_leave_the_floating_point_range_stop_nothing() -> None:
    huge = ArmChange(arm="b", reward=1.7e308, active=True)
    events = [huge, *(event for n in range(9) for event in session(f"s{n}", n, parameters_version=1))]
    version = learned(*events, progress(1350))
    assert decode_parameters(encode_parameters(version)).accounts == version.accounts != NOTHING
    orjson.dumps(all_figures(version))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        ({"total": "AAAA"}, "accounts are damaged"),
        ({"total": b64encode(np.full(5, -1.0)).decode()}, "rows of sums"),
        ({"total": b64encode(np.zeros(20)).decode()}, "more ads than the 3 of the catalogue"),
        ({"sessions": -1}, "accounts.sessions"),
    ],
)
def test_damaged_accounts_are_refused(damage: dict[str, Any], says: str) -> None:
    record = parameters_document(learned(*session("s", 10), progress(1350)))
    record["accounts"] |= damage
    with pytest.raises(ParametersError, match=says):
        decode_parameters(orjson.dumps(record))


# ── words ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def version_of(displays: list[float], clicks: list[float], rewards: list[float], retired: int = -1) -> Parameters:
    """Return a version with such accounts; every click earned the reward of its ad."""
    arms = tuple(Arm(arm=f"ad-{k}", reward=reward, active=k != retired) for k, reward in enumerate(rewards))
    ads = np.array([displays, clicks, np.multiply(clicks, rewards), displays, np.zeros(len(arms))])
    accounts = Accounts(total=Sums(sessions=10_000, ads=ads))
    return replace(Parameters.first(replace(SETTINGS, answers="learned"), arms), accounts=accounts)


def notes(version: Parameters) -> dict[str, str | None]:
    return {ad["arm"].removeprefix("ad-"): ad["note"] for ad in all_figures(version)["arms"]}


def test_an_ad_does_badly_if_its_displays_earn_little_and_the_note_says_why() -> None:
    # An ad that pays much and is rarely clicked does well (4); of one with few displays nothing is known (6).
    displays, clicks = [1000, 1000, 1000, 1000, 1000, 49, 60, 1000], [100, 110, 5, 100, 12, 0, 0, 0]
    version = version_of(displays, clicks, [1.0, 1.0, 1.0, 0.05, 9.0, 1.0, 1.0, 1.0], retired=7)
    reasons = {"2": "hardly clicked", "3": "low revenue per display", "5": "new: 49 displays"}
    assert notes(version) == {**dict.fromkeys("01467"), **reasons}


def test_an_ad_that_is_hardly_ever_answered_says_so() -> None:
    mute = np.arange(28) < 12  # more than are named elsewhere
    counts = AnswerCounts(displayed=np.full((3, 28), 150.0), answered=np.where(mute, 0.0, np.full((3, 28), 150.0)))
    model = AdditiveModel.certain(np.zeros(2), np.where(mute, -8.0, -2.0))
    version = replace(version_of([500.0] * 28, [50.0] * 28, [1.0] * 28), answers=counts, model=model)
    assert [note for note in notes(version).values() if note] == ["hardly ever answered"] * 12


def test_the_best_ads_are_shown_and_of_the_others_first_those_that_do_badly() -> None:
    version = version_of([1000] * 6 + [900, 10, 800], [90, 80, 70, 60, 50, 40, 1, 0, 2], [1.0] * 9, retired=4)
    shown = best_and_worst(version, 3)
    assert [ad["arm"] for ad in shown["ads"]] == ["ad-0", "ad-1", "ad-2", "ad-6", "ad-8", "ad-5"]
    assert [ad["does_badly"] for ad in shown["ads"]] == [False, False, False, True, True, False]
    assert (shown["top"], shown["hidden"]) == (3, 2)
