"""Fixed orders and imported logs: answers against the truth, and what has no answer."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from worker.cli.main import main
from worker.errors import InputError
from worker.evaluate.evaluation import Evaluation, evaluate_log
from worker.evaluate.planning import Change
from worker.stream.parameters import decode_parameters

from ..programs import show
from .histories import History, value
from .recording import record

SURE = 0.9999  # one log is one draw: at this confidence, a right interval does not miss
SMALL = History(environment="uniform", sessions=2500, arms=3, horizon=2)
OTHER = ("ad-3", "ad-1")


def evaluated(log: str, *order: str, confidence: float = SURE, **options: Any) -> Evaluation:
    return evaluate_log(log, Change(settings={"policy": "fixed", "order": order}), confidence=confidence, **options)


def answers(evaluation: Evaluation) -> dict[str, tuple[float, float]]:
    return {e.method: (e.revenue.low, e.revenue.high) for e in evaluation.estimates if e.revenue is not None}


def refusals(evaluation: Evaluation) -> dict[str, str]:
    return {e.method: e.refused for e in evaluation.estimates if e.refused is not None}


# ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("served", ["uniform", "softmax", "lot"])
@pytest.mark.parametrize("order", [(), (2, 0)], ids=str)
def test_recorded_propensities_answer_what_a_fixed_order_would_have_earned(served, order, tmp_path: Path) -> None:
    history = replace(SMALL, served=served)
    evaluation = evaluated(history.imported(tmp_path), *[f"ad-{k + 1}" for k in order])
    found, truth = answers(evaluation), history.truth(order)
    assert set(found) == {"snips", "direct", "dr"}
    for method, (low, high) in found.items():
        assert low < truth < high, method
        assert high - low < truth, method
    assert evaluation.left_out == {}


@pytest.mark.parametrize("known", [True, False])
def test_the_order_that_was_shown_has_earned_what_the_log_has(known: bool, tmp_path: Path) -> None:
    evaluation = evaluated(replace(SMALL, served="fixed", known=known).imported(tmp_path), "ad-1")
    found = {e.method: e.revenue for e in evaluation.estimates}
    for method in ("snips", "dr"):
        assert found[method].estimate == pytest.approx(evaluation.served.revenue.estimate)
        assert found[method].low == pytest.approx(evaluation.served.revenue.low, rel=1e-3)


# ── refusals ─────────────────────────────────────────────────────────────────────────────────────────────────────────

UNSEEN = "arms that no session of the log has seen at that position"


@pytest.mark.parametrize(
    ("changes", "weighted", "direct"),
    [
        ({"served": "fixed", "known": False}, "other ads in 100.0% of the imported sessions, and how likely", UNSEEN),
        ({"served": "fixed"}, "of the imported sessions, and no propensity is below 1", UNSEEN),
        ({"known": False}, r"is not known \(import with --propensity-column\)", None),
        ({"wrong": 0.7}, r"weights of position 1 have the mean 1\.\d\d in place of 1", None),
    ],
    ids=str,
)
def test_what_the_log_does_not_say_has_no_answer(changes, weighted, direct, tmp_path: Path) -> None:
    evaluation = evaluated(replace(SMALL, **changes).imported(tmp_path), *OTHER)
    reasons = refusals(evaluation)
    for method in ("snips", "dr"):
        assert re.search(weighted, reasons[method])
    assert (direct or "") in reasons.get("direct", "")
    assert ("direct" in reasons) == (direct is not None)


def test_an_answer_for_a_part_of_the_users_says_so(tmp_path: Path) -> None:
    evaluation = evaluated(replace(SMALL, served="some").imported(tmp_path), *OTHER)
    (note,) = (note for note in evaluation.notes if "chosen by lot" in note)
    used = {e.method: e.sessions for e in evaluation.estimates}
    assert used["snips"] < used["direct"] == SMALL.sessions
    assert note.startswith(f"snips and dr use the {used['snips']} of {SMALL.sessions} sessions whose slates were left")


def test_a_propensity_that_is_missing_at_a_later_position_is_missing_for_all(tmp_path: Path) -> None:
    rows = SMALL.table().split("\n")
    at = next(n for n, row in enumerate(rows) if row.split(",")[2] == "2")
    table = [*rows[:at], rows[at].rpartition(",")[0] + ",", *rows[at + 1 :]]
    reasons = refusals(evaluated(SMALL.imported(tmp_path, "\n".join(table)), *OTHER))
    assert "1 imported displays after the first have no propensity" in reasons["snips"]
    assert set(reasons) == {"snips", "dr"}


def test_other_policies_need_parameters_for_an_imported_log(tmp_path: Path) -> None:
    log, learned = SMALL.imported(tmp_path), tmp_path / "learned.json"
    with pytest.raises(InputError, match="policy aucbbp: give --policy fixed or random, or --parameters"):
        evaluate_log(log, Change())
    assert main(["replay", log, "--relearn", "--output", str(learned)]) == 0
    given = decode_parameters(learned.read_bytes())
    evaluation = evaluate_log(log, Change(settings={"policy": "greedy"}, parameters=given))
    assert set(answers(evaluation)) == {"snips", "direct", "dr"}
    assert evaluation.notes[0].startswith("version ")  # it has learned from this log
    assert set(answers(evaluate_log(log, Change(settings={"policy": "random"})))) == {"snips", "direct", "dr"}


# ── coverage ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.thorough
def test_intervals_of_forty_logs_cover_the_revenue_of_a_fixed_order(tmp_path: Path) -> None:
    covered, answered = Counter[str](), Counter[str]()
    for seed in range(40):
        world = ("uniform", "tastes", "leaving", "opposite")[seed // 4 % 4]
        served, folder = ("share", "uniform", "share", "softmax")[seed % 4], tmp_path / str(seed)
        folder.mkdir()
        history = History(served=served, environment=world, arms=4, horizon=2, stay=1.0, seed=seed)
        path, truth = folder / "log.jsonl", history.truth()
        if served == "share":
            sizes = {"arms": 4, "horizon": 2, "users": 300, "episodes": 12}
            demo = record(path, environment=world, repeats=False, random_share=0.4, seed=seed, **sizes)
            truth = value(demo.world, [0, 1])
        else:
            history.imported(folder)
        for method, (low, high) in answers(evaluated(str(path), confidence=0.95)).items():
            answered[f"{served} {method}"] += 1
            covered[f"{served} {method}"] += low <= truth <= high
    figures = {name: f"{covered[name]} of {count}" for name, count in sorted(answered.items())}
    show(f"{covered.total()} of {answered.total()} intervals cover: {figures}")
    assert answered.total() >= 100, figures
    assert 0.88 <= covered.total() / answered.total() <= 0.99, figures
