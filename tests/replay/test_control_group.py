"""The control group in a whole run: who is in it, what it gets, and the lift by a reference session by session."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from worker.bandit.planning import slate_chances, values_of_slates
from worker.embedded.runner import Embedded
from worker.logs.format import LogWriter
from worker.replay.verify import verify
from worker.stream.chance import lottery
from worker.stream.contexts import pack_context, stack_packed
from worker.stream.decoding import decode_journal
from worker.stream.events import Arrival, FeedbackFact, Opened
from worker.stream.learner import Learner
from worker.stream.lift import Lift, Scores
from worker.stream.parameters import Parameters, decode_parameters
from worker.stream.settings import CONTROLS
from worker.stream.slates import SlatePlanner
from worker.stream.tagged import TaggedVersion
from worker.stream.version_records import encode_parameters

from ..golden.recording import ORDERS, Run
from .logs import Replay, change, is_reproduced, journal, lines_of, of, payload

SHARE = 0.3
CONTROLLED = {"control_share": SHARE, "order": ("ad-3", "ad-0"), "policy": "aucbbp", "repeats": False}


class Visits(Run):
    """Users who come three times each, and are known."""

    def _send(self, at: int, topic: str, name: str, value: bytes) -> None:
        if topic == self.topics.arrivals and value.startswith(b"{"):
            value = orjson.dumps({**orjson.loads(value), "user_id": user_of(name)})
        super()._send(at, topic, name, value)


def user_of(session: str) -> str:
    return f"visitor-{int(session.removeprefix('user-')) // 3}"


def recorded(path: Path, *, sessions: int = 300, orders: Any = ORDERS, **changes: Any) -> Embedded:
    with LogWriter(path) as log:
        run = Visits(sessions=sessions, rate=4, seed=0, oddities=True, tap=log, settings=CONTROLLED | changes)
        return run.go(orders)


def opened_in(lines: list[Any]) -> dict[str, Opened]:
    found = [decode_journal(line["payload"].encode()) for line in journal(lines, "opened")]
    return {one.session_id: one for one in found if isinstance(one, Opened)}


@pytest.mark.parametrize("control", CONTROLS)
def test_the_group_is_a_share_of_the_users_and_gets_the_control_in_any_case(tmp_path: Path, control: str) -> None:
    order = {} if control == "fixed" else {"order": ()}
    runner = recorded(tmp_path / "log", control=control, random_share=0.3, warmup=2, **order)
    lines, salt = lines_of(tmp_path / "log"), runner.versions.newest.settings.salt
    versions = {one.version: one for one in map(decoded, of(lines, "parameters"))}
    opened = opened_in(lines)
    for name, one in opened.items():
        assert ("control" in one.modes) == (lottery("control", salt, [user_of(name)])[0] < SHARE)
    controls = [one for one in opened.values() if "control" in one.modes]
    assert len(opened) * SHARE * 0.6 < len(controls) < len(opened) * SHARE * 1.4
    assert {mode for one in opened.values() for mode in one.modes} >= {"control", "random", "warmup"}
    for one in controls:
        assert set(one.modes) == {"control"}
        version, eligible = versions[one.parameters_version], []
        if control == "fixed":
            eligible = ["ad-3", "ad-0", *(arm.arm for arm in version.arms if arm.arm not in ("ad-3", "ad-0"))]
        elif control == "popular":
            eligible = [version.arms[k].arm for k in version.popular] or [arm.arm for arm in version.arms]
        active = {arm.arm for arm in version.arms if arm.active}
        first = [arm for arm in eligible if arm in active and arm not in one.exclude]
        assert one.slate == tuple(first[: len(one.slate)]) or not eligible
        assert len(one.slate) == min(4, len(active - set(one.exclude)))


def decoded(line: Any) -> Parameters:
    return decode_parameters(line["payload"].encode())


def test_the_order_by_popularity_is_that_of_the_revenue_per_display(tmp_path: Path) -> None:
    newest = recorded(tmp_path / "log", control="popular", order=()).versions.newest
    displays, _, revenue, *_ = newest.accounts.total.of(len(newest.arms))
    usual = revenue.sum() / displays.sum()
    rates = [(revenue[k] + 20 * usual) / (displays[k] + 20) if displays[k] else -1.0 for k in newest.popular]
    assert sorted(newest.popular) == list(range(len(newest.arms)))
    assert rates == sorted(rates, reverse=True)
    assert len(set(rates)) > 3


@pytest.fixture(scope="module")
def tagged(tmp_path_factory: pytest.TempPathFactory) -> TaggedVersion:
    newest = recorded(tmp_path_factory.mktemp("before") / "log", sessions=120).versions.newest
    return TaggedVersion.of("before", newest)


@pytest.mark.parametrize("changes", [{}, {"control": "random", "order": ()}, {"control": "tag:before"}], ids=str)
def test_the_lift_is_that_of_a_reference_which_knows_every_session(
    tmp_path: Path, tagged: TaggedVersion, changes: dict[str, Any]
) -> None:
    runner = recorded(tmp_path / "log", tagged=tagged, **changes)
    lines, newest = lines_of(tmp_path / "log"), runner.versions.newest
    versions = {one.version: one for one in map(decoded, of(lines, "parameters"))}
    feedback = [decode_journal(line["payload"].encode()) for line in journal(lines, "feedback")]
    parts = [
        scores(one, versions[one.parameters_version], feedback)
        for one in opened_in(lines).values()
        if one.slate and one.arrived_at < (newest.window_end or 0)
    ]
    expected = Lift(control=newest.lift.control)
    for part in parts:
        expected = expected.plus(part, newest.lift.since)
    assert newest.lift.sessions == len(parts) > 100
    np.testing.assert_allclose(newest.lift.groups, expected.groups)
    np.testing.assert_allclose(newest.lift.sums, expected.sums, rtol=1e-6, atol=1e-6)
    assert decode_parameters(encode_parameters(newest)).lift == newest.lift


def scores(one: Opened, version: Parameters, feedback: list[Any]) -> Scores:
    """Return the scores of one session, planned by serving itself."""
    planner, packed = SlatePlanner(version), [pack_context(one.context)]
    arrival = Arrival(session_id=one.session_id, occurred_at=0, context=one.context, exclude=one.exclude)
    contexts, worth = version.prepared(stack_packed(packed, version.settings.dim)), np.zeros((2, 2, 1))
    for group, share in enumerate((0.0, 1.0)):
        (slate,) = planner.plan([arrival], packed, control_share=share)
        if share == ("control" in one.modes):
            assert slate.arms == one.slate
        arms = np.array([[planner.index[arm] for arm in slate.arms]])
        chances = slate_chances(version.model, contexts, arms)
        rates = version.rates.of_slates(arms) if version.rates else None
        for outcome, rewards in enumerate((version.rewards[arms], np.ones(arms.shape))):
            worth[outcome, group] = values_of_slates(chances, rewards, rates)[:, 0]
    clicks = [
        fact.position
        for fact in feedback
        if isinstance(fact, FeedbackFact)
        and fact.session_id == one.session_id
        and fact.clicked
        and one.arrived_at <= fact.occurred_at <= one.arrived_at + version.settings.session_timeout
        and one.slate[fact.position - 1 : fact.position] == (fact.arm,)
    ]
    price = version.arms[planner.index[one.slate[min(clicks) - 1]]].reward if clicks else 0.0
    ones = np.ones(1)
    return Scores(
        control=ones * ("control" in one.modes),
        share=ones * version.settings.control_share,
        earned=np.array([[price], [float(bool(clicks))]]),
        expected=worth,
    )


@pytest.mark.parametrize("control", ["popular", "tag:before"])
def test_a_run_with_a_control_group_is_reproduced_also_without_its_arrivals(
    tmp_path: Path, replayed: Replay, tagged: TaggedVersion, control: str
) -> None:
    recorded(tmp_path / "log", control=control, order=(), tagged=tagged)
    lines = lines_of(tmp_path / "log")
    is_reproduced(lines, replayed)
    report = replayed([line for line in lines if line not in of(lines, "arrivals")], verify)
    assert report.mismatches == 0
    wrong = next(line for line in journal(lines, "opened") if payload(line)["modes"][:1] == ["control"])
    change(wrong, modes=["exploit"] * len(payload(wrong)["modes"]))
    assert replayed(lines, verify).mismatches > 0


def test_a_learner_that_starts_from_any_version_has_the_same_lift_and_guard(tmp_path: Path) -> None:
    settings = {"max_loss": 0.01, "guardrail_sessions": 0}
    newest = recorded(tmp_path / "log", sessions=600, **settings).versions.newest
    lines = lines_of(tmp_path / "log")
    published = {one.version: one for one in map(decoded, of(lines, "parameters"))}
    facts = [(line["offset"], line["payload"].encode(), line["ts"]) for line in of(lines, "journal")]
    assert newest.lift.sessions > 400
    for number in (1, newest.version // 2, newest.version - 1):
        known = [published[n] for n in range(max(0, number - 7), number + 1)]
        learner = Learner(newest.settings, (), known)
        learner.handle(facts)
        assert learner.current.sha256 == newest.sha256
        assert learner.current.lift == newest.lift
