"""Evaluation of recorded logs, against the truth of their world."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from worker.bandit.additive import INTERCEPT_PRECISION
from worker.bandit.personal import PersonalModel
from worker.errors import FailedError, InputError
from worker.evaluate import evaluation as module
from worker.evaluate.estimators import Estimate
from worker.evaluate.evaluation import Evaluation, evaluate_log
from worker.evaluate.planning import Assembled, Change, align
from worker.evaluate.sessions import CONTROL, NO_VERSION, OPEN, UNCERTAIN
from worker.evaluate.support import weigh
from worker.replay.relearn import relearn
from worker.simulation.demo.run import Demo
from worker.simulation.users import Habits
from worker.stream.parameters import Parameters, decode_parameters
from worker.stream.settings import Arm
from worker.stream.version_records import encode_parameters

from ..replay.logs import (
    Document,
    change,
    journal,
    lines_of,
    of,
    payload,
    version,
    without,
    write,
)
from .recording import record, true_value

# One log is one draw: at this confidence, a right interval does not miss.
SURE = 0.9999


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Demo, Path]:
    path = tmp_path_factory.mktemp("recorded") / "log.jsonl"
    return record(path), path


@pytest.fixture(scope="module")
def demo(recorded: tuple[Demo, Path]) -> Demo:
    return recorded[0]


@pytest.fixture(scope="module")
def log(recorded: tuple[Demo, Path]) -> str:
    return str(recorded[1])


@pytest.fixture
def lines(recorded: tuple[Demo, Path]) -> list[Document]:
    return lines_of(recorded[1])


@pytest.fixture
def assembled(monkeypatch: pytest.MonkeyPatch) -> list[Assembled]:
    """The planned sessions of all evaluations, the last one last."""
    seen: list[Assembled] = []

    def spy(*args: Any, **options: Any) -> Assembled:
        seen.append(plain(*args, **options))
        return seen[-1]

    plain = module.assemble
    monkeypatch.setattr(module, "assemble", spy)
    return seen


def by_method(evaluation: Evaluation) -> dict[str, Estimate]:
    return {estimate.method: estimate for estimate in evaluation.estimates}


# ── against the truth ────────────────────────────────────────────────────────────────────────────────────────────────


EVERY = ("snips", "direct", "dr")


@pytest.fixture
def checked(assembled: list[Assembled]) -> Callable[..., Evaluation]:
    """Evaluate a target, and check that the intervals contain its true value."""

    def check(demo: Demo, log: str, settings: dict[str, Any], needed: Iterable[str]) -> Evaluation:
        evaluation = evaluate_log(log, Change(settings=settings), confidence=SURE)
        truth = true_value(demo, assembled[-1])
        found = {e.method: e.revenue for e in evaluation.estimates if e.revenue is not None}
        assert set(needed) <= set(found)
        for method, revenue in found.items():
            assert revenue.low < truth < revenue.high, method
        return evaluation

    return check


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"policy": "greedy"},
        {"policy": "random"},
        {"policy": "fixed", "order": ("ad-3", "ad-1")},
        {"policy": "epsilon-greedy", "epsilon": 0.4},
        {"beta": 0.2, "bonus": "paper"},
        {"policy": "myopic-ucb"},
    ],
    ids=str,
)
def test_the_intervals_contain_the_value_of_the_target(demo, log, checked, settings) -> None:
    checked(demo, log, settings, ("direct", "dr"))


def test_the_intervals_are_right_if_users_leave(tmp_path: Path, checked: Callable[..., Evaluation]) -> None:
    """Three in ten users never answer, and one in ten displays is left."""
    path = tmp_path / "log.jsonl"
    demo = record(path, Habits(silence=0.3, leaving=0.1, prefetching=0.2), random_share=0.6)
    evaluation = checked(demo, str(path), {"policy": "greedy"}, EVERY)
    for estimate in evaluation.estimates:
        if estimate.revenue is not None:
            assert estimate.revenue.high - estimate.revenue.low < estimate.revenue.low  # a third would be noticed


@pytest.mark.parametrize("policy", ["greedy", "epsilon-greedy"])
def test_the_intervals_are_right_if_users_leave_at_some_ads_more_than_at_others(tmp_path, checked, policy) -> None:
    """Ads differ in how many displays are answered, and in whom they are for; one never gets an answer."""
    path = tmp_path / "log.jsonl"
    demo = record(path, Habits(leaving=0.05), environment="leaving", arms=4, episodes=20, users=150)
    assert demo.world.stay is not None
    assert demo.world.stay.min() == 0
    evaluation = checked(demo, str(path), {"policy": policy}, ("direct", "dr"))
    found = by_method(evaluation)["direct"].revenue
    assert found is not None
    assert found.error < 0.1 * found.estimate


def test_ties_with_a_threshold_are_broken_by_the_session(tmp_path: Path, assembled: list[Assembled]) -> None:
    path = tmp_path / "log.jsonl"
    record(path, policy="aucbbp", random_share=0.0, episodes=6)
    tied = lines_of(path)
    for line in of(tied, "parameters"):
        line["payload"] = encode_parameters(replace(parameters_of(line), ties=(0.5,) * 2)).decode()
    evaluation = evaluate_log(write(path, tied), Change())
    assert by_method(evaluation)["direct"].refused is None
    again = evaluate_log(str(path), Change())
    np.testing.assert_array_equal(assembled[0].sessions.target, assembled[1].sessions.target)
    assert asdict(again) == asdict(evaluation)


def test_sessions_of_the_target_spread_their_optimism_as_they_did_when_they_were_served(tmp_path, assembled) -> None:
    path = tmp_path / "log.jsonl"
    record(path, random_share=0.0, episodes=6, repeats=False)
    planned = {}
    for spread in (1.0, 0.0):
        # Another epsilon changes nothing under ucbbp, but the slates are planned again.
        evaluate_log(str(path), Change(settings={"epsilon": 0.7, "spread": spread}))
        sessions = assembled[-1].sessions.part(~assembled[-1].sessions.warmup)
        planned[spread] = (sessions.target == sessions.slates).all(axis=1).mean()
    assert planned[1.0] == 1
    assert planned[0.0] < 1


def test_every_session_supports_the_policy_that_served_it(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    record(path, random_share=0.0, episodes=6)
    evaluation = evaluate_log(str(path), Change())
    found = by_method(evaluation)["snips"]
    assert found.sessions == evaluation.served.sessions
    assert found.revenue is not None
    assert found.revenue.estimate == pytest.approx(evaluation.served.revenue.estimate)


def test_a_policy_that_draws_needs_no_random_share(tmp_path: Path, checked: Callable[..., Evaluation]) -> None:
    path = tmp_path / "log.jsonl"
    demo = record(path, policy="epsilon-greedy", epsilon=0.4, random_share=0.0)
    evaluation = checked(demo, str(path), {"policy": "greedy"}, EVERY)
    assert {estimate.sessions for estimate in evaluation.estimates} == {evaluation.served.sessions}


@pytest.mark.parametrize("settings", [{"policy": "greedy"}, {"policy": "epsilon-greedy", "epsilon": 0.5}], ids=str)
def test_the_intervals_are_right_without_repeats(tmp_path, checked, settings) -> None:
    path = tmp_path / "log.jsonl"
    checked(record(path, repeats=False), str(path), settings, EVERY)


@pytest.mark.parametrize(
    "changes",
    [
        {"policy": "ucbbp", "repeats": False},
        {"policy": "epsilon-greedy", "epsilon": 0.5, "random_share": 0.2},
        {"policy": "random", "random_share": 0.0},
    ],
    ids=str,
)
def test_recorded_slates_have_the_probabilities_of_serving(tmp_path, assembled, changes) -> None:
    """Then weights have the mean 1 at every position, for any target."""
    path = tmp_path / "log.jsonl"
    record(path, **changes)
    evaluate_log(str(path), Change(settings={"policy": "fixed", "order": ("ad-2",)}))
    sessions = assembled[-1].sessions
    assert sessions.supported.all()
    for column in weigh(sessions).stopped.T:
        assert abs(column.mean() - 1) < 4 * column.std() / np.sqrt(len(column))


def test_a_worse_policy_is_recognised(log: str) -> None:
    worse = by_method(evaluate_log(log, Change(settings={"policy": "random"})))
    assert worse["direct"].difference is not None
    assert worse["direct"].difference.high < 0


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_log_without_a_journal_gives_the_same(log: str, lines: list[Document], tmp_path: Path) -> None:
    target = Change(settings={"policy": "greedy"})
    unjournaled = without(lines, "journal")
    assert evaluate_log(write(tmp_path / "log.jsonl", unjournaled), target) == evaluate_log(log, target)


def test_every_session_is_evaluated_or_left_out_with_a_reason(demo: Demo, log: str) -> None:
    evaluation = evaluate_log(log, Change())
    assert set(evaluation.left_out) == {OPEN}
    assert (
        evaluation.served.sessions + evaluation.warmup + sum(evaluation.left_out.values()) == demo.embedded.tally.opened
    )


def open_again(lines: list[Document]) -> None:
    """A session is opened with two slates."""
    again = {**journal(lines, "opened")[0], "offset": 10**6}
    slate = payload(again)["slate"]
    change(again, slate=[next(arm for arm in ("ad-1", "ad-2") if arm != slate[0]), *slate[1:]])
    lines.append(again)


def doubt(lines: list[Document]) -> None:
    change(journal(lines, "opened")[0], uncertain=True)


def control(lines: list[Document]) -> None:
    opened = journal(lines, "opened")[0]
    change(opened, modes=["control"] * len(payload(opened)["slate"]))


@pytest.mark.parametrize(("spoil", "reason"), [(open_again, UNCERTAIN), (doubt, UNCERTAIN), (control, CONTROL)])
def test_a_session_that_cannot_be_used_is_left_out(lines, tmp_path, spoil, reason) -> None:
    spoil(lines)
    evaluation = evaluate_log(write(tmp_path / "log.jsonl", lines), Change())
    assert evaluation.left_out[reason] == 1


def test_sessions_of_a_version_that_is_not_in_the_log_are_left_out(lines: list[Document], tmp_path: Path) -> None:
    served = {
        payload(line)["session_id"] for line in of(lines, "decisions") if payload(line)["parameters_version"] == 7
    }
    lines.remove(version(lines, 7))
    evaluation = evaluate_log(write(tmp_path / "log.jsonl", lines), Change())
    assert evaluation.left_out[NO_VERSION] == len(served) > 0


def test_a_log_without_parameters_or_without_sessions_is_refused(lines: list[Document], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no parameters"):
        evaluate_log(write(tmp_path / "log.jsonl", without(lines, "parameters")), Change())
    with pytest.raises(FailedError, match="no session"):
        evaluate_log(write(tmp_path / "log.jsonl", of(lines, "parameters")), Change())


# ── targets ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_settings_that_versions_are_made_for_need_parameters(log: str) -> None:
    settings = {"policy": "aucbbp"}
    with pytest.raises(
        InputError, match="needs versions that were made for it: give --parameters FILE, which adcascade"
    ):
        evaluate_log(log, Change(settings=settings))
    learned = relearn(log, changes=settings).learned
    assert learned is not None
    found = by_method(evaluate_log(log, Change(parameters=learned)))
    assert found["dr"].refused is None


def parameters_of(line: Document) -> Parameters:
    return decode_parameters(line["payload"].encode())


def test_the_same_log_gives_the_same_answer(log: str) -> None:
    target = Change(settings={"policy": "epsilon-greedy"})
    assert asdict(evaluate_log(log, target)) == asdict(evaluate_log(log, target))


# ── arms ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_removed_arms_are_integrated_out(lines: list[Document]) -> None:
    """The belief about the others stays the same, and new ones are at the base rate."""
    newest = parameters_of(version(lines, 15))
    model, settings = newest.model, replace(newest.settings, ridge=2.0)
    arms = [Arm(arm=name, reward=1.0) for name in ("a", "b", "c")]
    aligned = align(model, arms, [arms[2], Arm(arm="new", reward=1.0), arms[0]], settings=settings)
    contexts = np.random.default_rng(0).standard_normal((5, 3))
    np.testing.assert_allclose(aligned.widths(contexts)[:, [0, 2]], model.widths(contexts)[:, [2, 0]], rtol=1e-9)
    np.testing.assert_allclose(aligned.log_odds(contexts)[:, [0, 2]], model.log_odds(contexts)[:, [2, 0]], rtol=1e-12)
    assert isinstance(model, PersonalModel)
    assert aligned.biases[1] == pytest.approx(model.shared[0, 0])
    assert aligned.widths(np.zeros((1, aligned.dim)))[0][1] > np.sqrt(1 / INTERCEPT_PRECISION)
    assert align(model, arms, arms, settings=settings) is model
