import io
import json
from dataclasses import replace

import numpy as np
import pytest

from worker.bandit.additive import AdditiveModel
from worker.bandit.answers import AnswerCounts
from worker.bandit.click_model import Observations
from worker.cli.main import main
from worker.stream.contexts import Standardisation
from worker.stream.features import Features
from worker.stream.parameters import Parameters
from worker.stream.settings import Arm, LearningSettings
from worker.stream.version_records import encode_parameters

BY_HAND = {
    "horizon": 2,
    "policy": "ucbbp",
    "repeats": True,
    "bonus": "value",
    "beta": 1.0,
    "arms": [{"arm": "sure", "reward": 1.0}, {"arm": "dear", "reward": 3.0}],
    "theta_context": [0.0],
    "theta_arms": [2.0, -1.0],
    "precision": {"context": [[1.0]], "cross": [[0.0], [0.0]], "arms": [4.0, 4.0]},
}


def version(**changes):
    plain = {"repeats": True, "model": "additive", "intercept": False, "answers": "all", "standardise": False}
    settings = LearningSettings(dim=2, horizon=3, spread=0.0, **plain, **changes)
    arms = tuple(Arm(arm=name, reward=reward) for name, reward in (("a", 1.0), ("b", 2.0), ("c", 0.5)))
    belief = replace(AdditiveModel.prior(dim=2, arms=3, ridge=1.0), theta_arms=np.array([0.0, -2.0, 1.0]))
    return Parameters(version=4, settings=settings, arms=arms, model=belief, folds=4, thresholds=(0.0,) * 3)


@pytest.fixture
def call(capsys, tmp_path, monkeypatch):
    """Call `explain` in a folder with a record made by the learner (p.json) and one made by hand (hand.json)."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.json").write_bytes(encode_parameters(version()))
    (tmp_path / "hand.json").write_text(json.dumps(BY_HAND))

    def run(*arguments):
        code = main(["explain", *arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def test_json_has_exactly_the_fields_of_the_contract(call):
    code, out, err = call("--parameters", "p.json", "--context", "[0.5, -1]", "--json", "-")
    result = json.loads(out)
    assert (code, err) == (0, "")
    assert set(result) == {"slate", "positions"}
    assert len(result["slate"]) == len(result["positions"]) == 3
    for number, position in enumerate(result["positions"], start=1):
        assert set(position) == {"position", "continuation", "choice", "mode", "arms"}
        assert position["position"] == number
        assert position["choice"] == result["slate"][number - 1]
        assert position["mode"] == "explore"
        assert [one["arm"] for one in position["arms"]] == ["a", "b", "c"]
        fields = {"arm", "probability", "q", "width", "bonus", "score", "contributions"}
        assert all(set(one) == fields for one in position["arms"])
        for one in position["arms"]:
            for part in one["contributions"]:
                assert set(part) == {"feature", "value", "standardised", "coefficient", "contribution"}
            assert {part["feature"] for part in one["contributions"]} == {"base rate", "x[1]", "x[2]"}


# ── which ad for whom ────────────────────────────────────────────────────────────────────────────────────────────────

FEATURES = {"context": {"age": "number", "device": ["mobile", "desktop"], "city": {"hashed": 4}}}


def personal(seed=0):
    """A version that has learned from users with tastes, some of whom leave."""
    declared = Features.of_table(FEATURES)
    settings = LearningSettings(dim=declared.dim, horizon=2, warmup=0, features=declared)
    arms = tuple(Arm(arm=name, reward=reward) for name, reward in (("car", 3.0), ("toy", 1.0)))
    rng = np.random.default_rng(seed)
    contexts = np.zeros((400, declared.dim))
    contexts[:, 0] = rng.standard_normal(400)
    contexts[np.arange(400), 1 + rng.integers(0, 2, 400)] = 1.0
    shown = rng.integers(0, 2, 400)
    clicked = (contexts[:, 1] == shown).astype(float)
    where = np.arange(400) % 2
    seen = Observations(contexts=contexts, sessions=np.arange(400), arms=shown, positions=where, clicked=clicked)
    first = Parameters.first(settings, arms)
    counts = AnswerCounts(displayed=np.full((2, 2), 100.0), answered=np.array([[90.0, 50.0], [80.0, 40.0]]))
    return replace(
        first,
        version=7,
        model=first.model.fold(seen, estimator="laplace").model,
        folds=1,
        answers=counts,
        standardisation=Standardisation(centre=np.array([40.0, *[0.0] * 6]), scale=np.array([10.0, *[1.0] * 6])),
    )


def test_the_features_that_carried_the_choice_are_named(call, tmp_path):
    (tmp_path / "tastes.json").write_bytes(encode_parameters(personal()))
    context = '{"age": 25, "device": "mobile", "city": "Rome"}'
    code, out, err = call("--parameters", "tastes.json", "--context", context)
    assert (code, err) == (0, "")
    line = next(line for line in out.splitlines() if line.startswith("   log-odds of"))
    assert all(name in line for name in ("base rate", "device=mobile", "age=25", "city=Rome"))
    assert "goes on" in out
    assert "note: no session id" in out
    _, out, err = call("--parameters", "tastes.json", "--context", context, "--session", "s", "--json", "-")
    assert err == ""
    for one in json.loads(out)["positions"][0]["arms"]:
        parts = {part["feature"]: part["contribution"] for part in one["contributions"]}
        assert set(parts) == {"base rate", "age", "device=mobile", "city=Rome"}
        assert 1 / (1 + np.exp(-sum(parts.values()))) == pytest.approx(one["probability"])
        assert (parts["device=mobile"] > 0) == (one["arm"] == "toy")
        assert 0 < one["answer_rate"] < 1
        assert 0.5 <= one["spread"] <= 1.5


def test_a_context_without_names_may_have_gaps_where_features_are_declared(call, tmp_path):
    (tmp_path / "tastes.json").write_bytes(encode_parameters(personal()))
    code, out, _ = call("--parameters", "tastes.json", "--context", "[null, 1, 0, 0, 0, 1, 0]")
    assert code == 0
    assert "age missing +0.00" in out
    assert "city#3" in out


@pytest.mark.parametrize(
    ("context", "said"),
    [
        ('{"height": 3}', "context.height is not declared; declared are age, device, city"),
        ('{"age": "old"}', "context.age: a number is declared, not a text"),
        ("[1]", "has 1 numbers, the parameters need 7"),
        ("3", "or an object of declared features"),
        ("{", "or an object of declared features"),
    ],
)
def test_a_context_that_is_not_as_declared_is_refused(call, tmp_path, context, said):
    (tmp_path / "tastes.json").write_bytes(encode_parameters(personal()))
    check_refused(call("--parameters", "tastes.json", "--context", context), said)


def test_a_record_written_by_hand_is_enough(call):
    code, out, _ = call("--parameters", "hand.json", "--context", "[0]", "--json", "-")
    result = json.loads(out)
    assert code == 0
    sure = 1 / (1 + np.exp(-2.0))
    last = result["positions"][1]
    assert last["continuation"] == 0
    assert last["arms"][0]["probability"] == pytest.approx(sure, abs=1e-15)
    assert last["arms"][0]["bonus"] == pytest.approx(0.5 * sure * (1 - sure))
    assert result["positions"][0]["continuation"] == pytest.approx(sure)
    assert result["slate"] == ["dear", "dear"]


def test_overrides_change_the_plan(call):
    def slate(*more):
        return json.loads(call("--parameters", "hand.json", "--context", "[0]", "--json", "-", *more)[1])["slate"]

    assert slate("--policy", "greedy") == ["dear", "sure"]
    assert slate("--beta", "0") == ["dear", "sure"]
    assert slate("--policy", "greedy", "--horizon", "4") == ["dear", "dear", "dear", "sure"]
    assert slate("--exclude", "dear") == ["sure", "sure"]
    assert slate("--exclude", "dear", "--exclude", "sure") == []
    assert slate("--bonus", "paper") == ["dear", "sure"]  # equal widths: the same bonus for both changes nothing


def test_a_context_may_come_from_a_file_or_standard_input(call, tmp_path, monkeypatch):
    (tmp_path / "x.json").write_text("[0.5, -1]\n")
    given = call("--parameters", "p.json", "--context", "[0.5, -1]", "--json", "-")
    assert call("--parameters", "p.json", "--context", "@x.json", "--json", "-") == given
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"[0.5, -1]")))
    assert call("--parameters", "p.json", "--context", "-", "--json", "-") == given


def test_the_table_gives_the_reason_in_words(call):
    _, out, _ = call("--parameters", "hand.json", "--context", "[0]", "--policy", "greedy")
    assert "slate: dear → sure" in out
    assert "position 2, exploit: sure is expected to earn the most, 0.8808 (next: dear, 0.8068)" in out
    assert "nothing is planned after it" in out
    _, out, _ = call("--parameters", "hand.json", "--context", "[0]")
    assert "sure is expected to earn more (0.8808 against 0.8068), but dear may well be better" in out


def test_with_json_on_standard_output_the_notes_go_to_standard_error(call, tmp_path):
    (tmp_path / "cold.json").write_bytes(encode_parameters(replace(version(warmup=2), folds=1)))
    _, out, err = call("--parameters", "cold.json", "--context", "[0, 0]", "--json", "-")
    assert {position["mode"] for position in json.loads(out)["positions"]} == {"warmup"}
    assert err.startswith("note: warm-up, 1 of 2 folds: serving draws any eligible arm at random")


WRONG_CONTEXTS = {
    "[1]": "has 1 numbers, the parameters need 2",
    "[1, 1e999]": "JSON list of numbers",
    "[1, null]": "got `null` - at `$[1]`",
    '{"x": 1}': "got `object`",
    "1, 2": "JSON list of numbers",
    "[1e200, 1]": "too large",
    "@nowhere.json": "No such file",
}


def check_refused(result, said):
    code, out, err = result
    assert code == 2
    assert out == ""
    assert err.startswith("adcascade: ")
    assert err.count("\n") == 1
    assert said in err


@pytest.mark.parametrize("context", WRONG_CONTEXTS)
def test_a_wrong_context_is_refused(call, tmp_path, context):
    before = sorted(tmp_path.iterdir())
    result = call("--parameters", "p.json", "--context", context, "--json", "out.json")
    check_refused(result, WRONG_CONTEXTS[context])
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--context 0", "either --parameters FILE or --version VERSION"),
        ("--parameters p.json", "--context is missing"),
        ("--parameters - --context -", "both"),
        ("--parameters nowhere.json --context [0,0]", "No such file"),
        ("--parameters . --context [0,0]", "directory"),
        ("--parameters p.json --context [0,0] --policy oracle", "unknown value 'oracle'"),
        ("--parameters p.json --context [0,0] --exclude zebra", "no such arm"),
    ],
)
def test_wrong_flags_are_refused(call, arguments, message):
    check_refused(call(*arguments.split()), message)


def changed(**changes):
    return json.dumps({**BY_HAND, **changes})


WRONG_RECORDS = {
    "not JSON": "{",
    "no arrays": "{}",
    "no arm": changed(arms=[], theta_arms=[], precision={"context": [[1.0]], "cross": [], "arms": []}),
    "too many displays": changed(horizon=2**62),
}


@pytest.mark.parametrize("wrong", WRONG_RECORDS)
def test_a_wrong_record_is_refused(call, tmp_path, wrong):
    (tmp_path / "wrong.json").write_text(WRONG_RECORDS[wrong])
    before = sorted(tmp_path.iterdir())
    check_refused(call("--parameters", "wrong.json", "--context", "[0]", "--json", "out.json"), "wrong.json")
    assert sorted(tmp_path.iterdir()) == before
