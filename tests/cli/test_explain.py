import io
import json
from dataclasses import replace

import numpy as np
import pytest

from tests.golden.recording import GOLDEN
from tests.replay.logs import change, lines_of, of, write
from tests.report.shop import run
from worker.bandit.additive import AdditiveModel
from worker.bandit.answers import AnswerCounts
from worker.bandit.click_model import Observations
from worker.cli.explanation import NUMBERS
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
def explain(adcascade, tmp_path, monkeypatch):
    """Run `explain` on a record made by the learner (p), on one with tastes (tastes), or on one by hand (hand)."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.json").write_bytes(encode_parameters(version()))
    (tmp_path / "tastes.json").write_bytes(encode_parameters(personal()))
    (tmp_path / "hand.json").write_text(json.dumps(BY_HAND))

    def run(name, context, *more):
        ended = adcascade(f"explain --parameters {name}.json --context", context, *more)
        assert ended.code == 0
        return ended

    return run


def test_json_has_exactly_the_fields_of_the_contract(explain):
    result = explain("p", "[0.5, -1]", "--json", "-").json
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


def test_the_features_that_carried_the_choice_are_named(explain):
    context = '{"age": 25, "device": "mobile", "city": "Rome"}'
    out = explain("tastes", context).out
    line = next(line for line in out.splitlines() if line.startswith("   log-odds of"))
    assert all(name in line for name in ("base rate", "device=mobile", "age=25", "city=Rome"))
    assert "goes on" in out
    assert "note: no session id" in out
    ended = explain("tastes", context, "--session", "s", "--json", "-")
    assert ended.err == ""
    for one in ended.json["positions"][0]["arms"]:
        parts = {part["feature"]: part["contribution"] for part in one["contributions"]}
        assert set(parts) == {"base rate", "age", "device=mobile", "city=Rome"}
        assert 1 / (1 + np.exp(-sum(parts.values()))) == pytest.approx(one["probability"])
        assert (parts["device=mobile"] > 0) == (one["arm"] == "toy")
        assert 0 < one["answer_rate"] < 1
        assert 0.5 <= one["spread"] <= 1.5


def test_a_context_without_names_may_have_gaps_where_features_are_declared(explain):
    out = explain("tastes", "[null, 1, 0, 0, 0, 1, 0]").out
    assert "age missing +0.00" in out
    assert "city#3" in out


def test_a_record_written_by_hand_is_enough(explain):
    result = explain("hand", "[0]", "--json", "-").json
    sure = 1 / (1 + np.exp(-2.0))
    last = result["positions"][1]
    assert last["continuation"] == 0
    assert last["arms"][0]["probability"] == pytest.approx(sure, abs=1e-15)
    assert last["arms"][0]["bonus"] == pytest.approx(0.5 * sure * (1 - sure))
    assert result["positions"][0]["continuation"] == pytest.approx(sure)
    assert result["slate"] == ["dear", "dear"]


def test_arms_may_be_excluded(explain):
    for excluded, slate in ([], ["dear", "dear"]), (["dear"], ["sure", "sure"]), (["dear", "sure"], []):
        more = [word for arm in excluded for word in ("--exclude", arm)]
        assert explain("hand", "[0]", "--json", "-", *more).json["slate"] == slate


def test_a_context_may_come_from_a_file_or_standard_input(explain, tmp_path, monkeypatch):
    (tmp_path / "x.json").write_text("[0.5, -1]\n")
    given = explain("p", "[0.5, -1]")
    assert explain("p", "@x.json") == given
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"[0.5, -1]")))
    assert explain("p", "-") == given


def test_the_table_gives_the_reason_in_words(explain, tmp_path):
    (tmp_path / "greedy.json").write_text(json.dumps({**BY_HAND, "policy": "greedy"}))
    out = explain("greedy", "[0]").out
    assert "slate: dear → sure" in out
    assert "position 2, exploit: sure is expected to earn the most, 0.8808 (next: dear, 0.8068)" in out
    assert "nothing is planned after it" in out
    out = explain("hand", "[0]").out
    assert "sure is expected to earn more (0.8808 against 0.8068), but dear may well be better" in out


def test_with_json_on_standard_output_the_notes_go_to_standard_error(explain, tmp_path):
    (tmp_path / "cold.json").write_bytes(encode_parameters(replace(version(warmup=2), folds=1)))
    ended = explain("cold", "[0, 0]", "--json", "-")
    assert {position["mode"] for position in ended.json["positions"]} == {"explore"}
    assert ended.err.startswith("note: warm-up, 1 of 2 folds: serving draws any eligible arm at random")


TOO_LONG = {**BY_HAND, "horizon": 2**62}
NO_ARM = {**BY_HAND, "arms": [], "theta_arms": [], "precision": {"context": [[1.0]], "cross": [], "arms": []}}


@pytest.mark.parametrize(
    ("record", "context", "message"),
    [
        (BY_HAND, "[1, 2]", "has 2 numbers, the parameters need 1"),
        (BY_HAND, "[1e999]", "JSON list of numbers"),
        (BY_HAND, "[null]", "got `null` - at `$[0]`"),
        (BY_HAND, '{"x": 1}', "got `object`"),
        (BY_HAND, "1, 2", "JSON list of numbers"),
        (BY_HAND, "[1e200]", "too large"),
        (BY_HAND, "@nowhere.json", "No such file"),
        (None, '{"height": 3}', "context.height is not declared; declared are age, device, city"),
        (None, '{"age": "old"}', "context.age: a number is declared, not a text"),
        (None, "[1]", "has 1 numbers, the parameters need 7"),
        (None, "3", "or an object of declared features"),
        (None, "{", "or an object of declared features"),
        ("{", "[0]", "--parameters record.json: "),
        ({}, "[0]", "--parameters record.json: "),
        (NO_ARM, "[0]", "there is no arm"),
        (TOO_LONG, "[0]", "horizon must be at most"),
    ],
)
def test_a_wrong_context_or_record_is_refused_and_nothing_is_written(
    adcascade, tmp_path, monkeypatch, record, context, message
):
    monkeypatch.chdir(tmp_path)
    text = record if isinstance(record, str) else json.dumps(record)
    (tmp_path / "record.json").write_bytes(encode_parameters(personal()) if record is None else text.encode())
    ended = adcascade("explain --parameters record.json --json out.json --context", context)
    assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1)
    assert message in ended.err
    assert [path.name for path in tmp_path.iterdir()] == ["record.json"]


# ── a session that was served ────────────────────────────────────────────────────────────────────────────────────────


def test_a_session_of_a_log_is_one_page_of_text_html_and_json(adcascade, tmp_path):
    line = f"explain {GOLDEN} --session user-00100 --why-not ad-1"
    ended = adcascade(line, "--html", tmp_path / "why.html")
    assert ended.code == 0
    assert ended.out.startswith("planned again: the recorded decision, to the letter\nsession:   user-00100\n")
    for part in (
        "\nserved by: version 1, mode explore\n",
        "\nanswered: ",
        "\nlearned:   version 4 has 4 displays of it ",
        "\nwhy not ad-1?\n",
    ):
        assert part in ended.out
    page = (tmp_path / "why.html").read_text()
    assert page.count("<section>") == page.count("<svg") + 1 == 5
    assert "why not ad-1?" in page
    assert all(f"<dt>{name}<dd>" in page for name in NUMBERS)
    said = adcascade(line, "--json", "-").json
    assert set(said) == {"session", "slate", "positions", "why_not"}
    assert said["session"]["shown"] == said["slate"] == [position["choice"] for position in said["positions"]]
    assert said["session"]["differences"] == []
    assert said["why_not"]["revenue"]["now"] == 2.0
    again = adcascade(f"replay {GOLDEN} --json -")
    assert again.json["mismatches"] == 0


def test_a_plan_that_is_not_the_recorded_decision_is_loud(adcascade, tmp_path):
    lines = lines_of(GOLDEN)
    changed = next(line for line in of(lines, "decisions") if line["key"] == "user-00100")
    change(changed, mode="exploit")
    path = write(tmp_path / "log", lines)
    ended = adcascade(f"explain {path} --session user-00100 --html {tmp_path}/why.html")
    assert ended.code == 1
    first, second, *_ = ended.out.splitlines()
    assert first.startswith("!!! PLANNED AGAIN, THIS IS NOT THE RECORDED DECISION")
    assert second == "!!! decision for position 1: mode is exploit, planned again explore"
    assert 'class="loud"' in (tmp_path / "why.html").read_text()
    assert adcascade(f"explain {path} --session user-00100 --json -").err.startswith("!!! PLANNED AGAIN")


def test_a_session_of_a_state_folder_has_the_features_that_a_log_has(adcascade, tmp_path):
    run(tmp_path / "log", hours=1, state=tmp_path / "state")
    sent = json.loads(of(lines_of(tmp_path / "log"), "arrivals")[0]["payload"])
    folder, log = (
        adcascade(f"explain {source} --session {sent['session_id']}").out.splitlines()
        for source in (f"--state {tmp_path}/state", f"{tmp_path}/log")
    )
    context = {**sent["context"], "member": int(sent["context"]["member"])}
    shown = "context:   " + ", ".join(f"{name}={value}" for name, value in context.items())
    assert shown in folder
    assert shown in log


def test_every_text_of_the_page_is_escaped(explain, tmp_path):
    named = replace(version(), arms=(Arm(arm="<b>&", reward=1.0), *version().arms[1:]))
    (tmp_path / "p.json").write_bytes(encode_parameters(named))
    out = explain("p", "[0, 0]", "--why-not", "<b>&", "--html", "why.html").out
    assert "why not <b>&?" in out
    page = (tmp_path / "why.html").read_text()
    assert "<b>" not in page
    assert "why not &lt;b&gt;&amp;?" in page


@pytest.mark.parametrize(
    ("changes", "session", "said"),
    [
        ({"policy": "greedy"}, None, "revenue per click: 0.5; from "),
        ({"policy": "greedy"}, None, "in steps of 15% of the revenue and 0.25 of the log-odds: a narrower range"),
        ({"policy": "ucbbp"}, None, "score at position 1: "),
        ({"warmup": 9}, "s", "a lot chose the slate: the chance 33.3% for position 1"),
        ({"policy": "fixed"}, None, "the order is fixed: neither its revenue nor its click probability counts"),
        ({"policy": "aucbbp"}, None, "bonus: this session did not explore; if it had, with all bonuses"),
    ],
)
def test_why_not_says_what_an_ad_would_have_needed(explain, tmp_path, changes, session, said):
    record = replace(version(**changes), thresholds=(9e9,) * 3)
    (tmp_path / "p.json").write_bytes(encode_parameters(record))
    more = () if session is None else ("--session", session)
    assert said in explain("p", "[0.5, -1]", "--why-not", "c", *more).out


def test_why_not_names_what_is_in_the_way_and_what_of_the_user_is_against_it(explain):
    context = '{"age": 25, "device": "mobile", "city": "Rome"}'
    out = explain("tastes", context, "--exclude", "car", "--why-not", "car").out
    assert "   excluded by the arrival: car\n" in out
    assert "the arrival excluded it; without that it would be at position " in out
    assert "against it, of this user: device=mobile -" in out
