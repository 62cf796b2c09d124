"""The status page: its document, figures, list of problems and files."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import numpy as np
import pytest

from tests.embedded import traffic
from tests.metrics.episodes import an_episode
from worker.bandit.answers import AnswerCounts
from worker.bandit.click_model import Observations
from worker.bandit.personal import PersonalModel
from worker.embedded.runner import Embedded
from worker.http.server import WebServer
from worker.metrics.history import MOST_MARKS, exploration_share
from worker.metrics.observer import Metrics
from worker.simulation.demo.run import Demo, DemoSettings
from worker.simulation.users import Habits
from worker.stream.contexts import pack_context
from worker.stream.features import Features
from worker.stream.parameters import Parameters
from worker.stream.settings import Arm, LearningSettings
from worker.stream.topology import Emits, Tally
from worker.stream.troubles import TROUBLES
from worker.web.figures import MOST_ARMS, lately, positions, top_arms
from worker.web.status import FILES, MOST_LAG, problems, status_routes

UNTIDY = Habits(silence=0.1, leaving=0.05, disordered=0.3, duplicates=0.3, poison=0.05, prefetching=0.4)


@pytest.fixture(scope="module")
def ran() -> tuple[Metrics, Demo]:
    metrics = Metrics()
    metrics.learning(here=True)
    demo = Demo(DemoSettings(users=40, episodes=8), habits=UNTIDY, metrics=metrics)
    while not demo.finished:
        demo.step()
    return metrics, demo


def document(metrics: Metrics, **options: object) -> dict[str, object]:
    return json.loads(status_routes(metrics, **options)["/status.json"]({}).body)  # type: ignore[arg-type]


def document_of(version: Parameters) -> dict[str, object]:
    metrics = Metrics()
    metrics.version(version)
    return document(metrics)


def a_version(arms: int = 2, **changes: object) -> Parameters:
    first = Parameters.first(
        LearningSettings(dim=2), tuple(Arm(arm=f"a{index}", reward=1.0 + index) for index in range(arms))
    )
    return replace(first, **changes)  # type: ignore[arg-type]


# ── the document ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_document_matches_the_run(ran):
    metrics, demo = ran
    shown = document(metrics, runner="demo")
    windows = shown["windows"]
    assert windows["end"] == [row.episode.window_end for row in demo.rows]
    assert windows["sessions"] == [row.episode.sessions for row in demo.rows]
    assert windows["reward"] == pytest.approx([row.episode.reward for row in demo.rows], rel=1e-4)
    assert windows["oracle"] == pytest.approx([row.worth.oracle for row in demo.rows], rel=1e-4)
    per_session = [(row.worth.oracle - row.worth.served) / row.worth.sessions for row in demo.rows]
    assert windows["pseudo"] == pytest.approx(per_session, rel=1e-3, abs=1e-9)
    assert shown["parameters"]["budget"] == pytest.approx(exploration_share(demo.parameters), rel=1e-4)
    assert shown["counters"]["decisions"] == demo.embedded.tally.decisions.total()
    assert shown["dead"] == demo.embedded.tally.dead
    assert shown["parameters"]["version"] == demo.parameters.version
    assert shown["simulated"] is True
    assert shown["learning"]["windows"] == len(demo.rows)
    assert set(shown["balances"].values()) == {0.0}
    assert shown["lag"] == {}  # nothing is consumed


def test_a_new_process_has_an_empty_document():
    shown = document(Metrics())
    assert shown["windows"]["end"] == shown["arms"] == shown["positions"] == []
    assert shown["parameters"] is None
    assert shown["time"] is None
    assert [problem["text"] for problem in shown["problems"]] == ["No parameters have been received yet."]


def test_without_a_true_model_there_is_no_pseudo_regret():
    metrics = Metrics()
    metrics.episode(an_episode())
    shown = document(metrics)
    assert shown["simulated"] is False
    assert shown["windows"]["pseudo"] == [None]
    assert shown["recent"]["pseudo"] is None
    assert shown["recent"]["posterior"] == pytest.approx(0.2)


def test_numbers_that_are_not_finite_become_null():
    metrics = Metrics()
    metrics.episode(an_episode(regret_bound=float("inf"), expected_reward=float("nan")))
    assert document(metrics)["windows"]["expected"] == [None]


def test_an_answer_is_reused_for_half_a_second(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("worker.web.status.monotonic", lambda: now[0])
    metrics = Metrics()
    route = status_routes(metrics)["/status.json"]
    before = route({}).body
    metrics.add(Tally(arrivals=5, opened=5))
    assert route({}).body is before
    now[0] = 10.0
    assert json.loads(route({}).body)["counters"]["arrivals"] == 5


def test_the_age_of_the_parameters_follows_the_clock():
    metrics = Metrics()
    metrics.version(a_version(made_at=1_000_000))
    metrics.watermark(1_060_000)
    assert document(metrics)["parameters"]["age"] == 60_000
    assert document(metrics, clock=lambda: 1_005_000)["parameters"]["age"] == 5_000


# ── lately ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_click_rates_are_among_the_sessions_without_an_earlier_click():
    metrics = Metrics()
    metrics.version(a_version())
    tally = Tally(arrivals=100, opened=100)
    tally.clicks.update({1: 20, 3: 40})
    metrics.batches([Emits(tally=tally)], 100, 0.01)
    rows = positions(metrics.snapshot())
    assert [(row["sessions"], row["clicks"]) for row in rows] == [(100, 20), (80, 0), (80, 40), (40, 0), (40, 0)]


def test_recent_figures_leave_out_events_before_the_oldest_mark():
    metrics = Metrics()
    metrics.version(a_version())
    metrics.watermark(0)
    old = Tally(arrivals=100, opened=100)
    old.clicks[1] = 90
    metrics.batches([Emits(tally=old)], 100, 0.01)
    for minute in range(1, MOST_MARKS + 1):
        metrics.watermark(minute * 60_000)
    new = Tally(arrivals=50, opened=50)
    new.clicks[1] = 5
    metrics.batches([Emits(tally=new)], 50, 0.01)
    snapshot = metrics.snapshot()
    rows = positions(snapshot)
    assert (rows[0]["sessions"], rows[0]["clicks"]) == (50, 5)
    assert (lately(snapshot)["span"], lately(snapshot)["read"]) == ((MOST_MARKS - 1) * 60_000, 50)


# ── arms ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_arms_with_the_highest_revenue_come_first_and_retired_ones_last():
    assert top_arms(a_version(arms=0), ()) == []
    arms = top_arms(a_version(arms=30), ())
    assert len(arms) == MOST_ARMS
    assert [arm["arm"] for arm in arms[:3]] == ["a29", "a28", "a27"]
    assert all(0 < arm["low"] < arm["probability"] < arm["high"] < 1 for arm in arms)
    version = a_version(arms=3)
    retired = replace(version, arms=(*version.arms[:2], replace(version.arms[2], active=False)))
    assert [(arm["arm"], arm["active"]) for arm in top_arms(retired, ())] == [("a1", True), ("a0", True), ("a2", False)]


def test_arms_are_shown_as_recent_users_see_them_not_a_user_without_features():
    """With one-hot features nobody has x = 0: there the estimate is that of the prior."""
    version = a_version(arms=2)
    everybody = np.eye(2)[np.arange(400) % 2]
    seen = Observations(
        contexts=everybody,
        sessions=np.arange(400),
        arms=np.arange(400) % 2,
        positions=np.zeros(400, dtype=int),
        clicked=(np.arange(400) % 20 == 0) * 1.0,
    )
    taught = replace(version, model=version.model.fold(seen, estimator="laplace").model)
    users = [pack_context(tuple(row)) for row in everybody[:10]]
    shown = {arm["arm"]: arm for arm in top_arms(taught, users)}
    expected = 1 / (1 + np.exp(-taught.model.log_odds(everybody[:10])))
    assert [shown[name]["probability"] for name in ("a0", "a1")] == pytest.approx(expected.mean(axis=0), rel=1e-4)
    assert shown["a1"]["probability"] < 0.06 < top_arms(taught, ())[0]["probability"]
    assert all(arm["low"] < arm["probability"] < arm["high"] for arm in shown.values())


def test_the_document_averages_over_the_contexts_of_recent_batches():
    metrics = Metrics()
    metrics.version(a_version())
    assert document(metrics)["users"] == 0
    for _ in range(3):
        metrics.batches([Emits(sample=pack_context((1.0, 0.0)))], 1, 0.0)
    assert document(metrics)["users"] == 3


# ── problems ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def texts(metrics: Metrics, unready: str | None = None) -> str:
    return " ".join(problem["text"] for problem in problems(metrics.snapshot(), unready))


def test_every_problem_has_a_sentence():
    metrics = Metrics()
    metrics.version(a_version())
    assert texts(metrics) == ""
    metrics.version(a_version(frozen=True))
    metrics.add(Tally(arrivals=3, opened=2))
    metrics.census([SimpleNamespace(open_sessions=2, parked=0)])
    metrics.count("refused_versions")
    metrics.consumer_lag("clicks", MOST_LAG + 1)
    metrics.episode(an_episode(rejected="not finite"))
    text = texts(metrics, unready="recovering")
    for part in ("Not ready: recovering", "arrivals +1", "two learners", "no usable", "records of clicks", "frozen"):
        assert part in text


def test_a_trouble_has_details_and_what_to_do():
    metrics = Metrics()
    metrics.version(a_version())
    metrics.consumer_lag("clicks", MOST_LAG + 1)
    tally = Tally(arrivals=100, opened=95, dead_arrivals=5)
    tally.troubles.add("dead-letters", "ads.arrivals, offset 7: norm", 5)
    metrics.add(tally)
    metrics.troubles.set("watermark-stalled", "partition 3 has not reported, for 30 s")
    stalled, dead, lag = problems(metrics.snapshot(), None)
    assert (stalled["level"], dead["level"], lag["level"]) == ("bad", "warn", "warn")
    assert stalled["detail"] == "Partition 3 has not reported, for 30 s."
    assert dead == {
        "level": "warn",
        "kind": "dead-letters",
        "text": TROUBLES["dead-letters"].meaning,
        "detail": "5 of 100 records in the last minutes. For example: ads.arrivals, offset 7: norm.",
        "do": TROUBLES["dead-letters"].remedy,
    }


# ── the files ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_page_is_small_and_loads_nothing_from_elsewhere():
    with WebServer(status_routes(Metrics())) as server:
        connection = HTTPConnection(urlsplit(server.url).netloc, timeout=120)
        size = 0
        for path in (*FILES, "/status.json"):
            connection.request("GET", path)
            answer = connection.getresponse()
            body = answer.read()
            policy = answer.getheader("Content-Security-Policy", "")
            assert answer.status == 200
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert "frame-ancestors 'none'" in policy
            assert answer.getheader("X-Content-Type-Options") == "nosniff"
            size += len(body)
            addresses = set(re.findall(rb"https?://[^\s\"')]+", body)) - {b"http://www.w3.org/2000/svg"}
            assert addresses == set(), path
        connection.close()
    assert size < 60_000


def test_scripts_never_turn_text_into_markup():
    folder = Path(__file__).parents[2] / "worker" / "web" / "page"
    for script in folder.glob("*.js"):
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", script.read_text())
    assert not re.search(r"<[^>]+\son\w+=|<script(?![^>]*src=)|style=", (folder / "index.html").read_text())


# ── answer rates, features and the model ─────────────────────────────────────────────────────────────────────────────


def counted(displays: Sequence[float], answers: Sequence[float]) -> AnswerCounts:
    return AnswerCounts(displayed=np.array([displays]), answered=np.array([answers])).with_horizon(5)


def clicked(*log_odds: float) -> PersonalModel:
    return PersonalModel.certain(np.array([[one, 0.0, 0.0] for one in log_odds]))


def test_an_ad_that_never_gets_any_feedback_is_named_everywhere_until_it_is_retired():
    metrics = Metrics()
    version = a_version(arms=3, answers=counted([500, 400, 300], [450, 0, 270]), model=clicked(-2, -9, -2))
    metrics.version(version)
    shown = document(metrics)
    (problem,) = shown["problems"]
    assert (problem["kind"], problem["level"]) == ("unanswered-ads", "warn")
    assert "a1 3% (400 displays)" in problem["detail"]
    retired = tuple(replace(arm, active=arm.arm != "a1") for arm in version.arms)
    metrics.version(replace(version, version=1, arms=retired))
    assert document(metrics)["problems"] == []


@pytest.mark.parametrize(
    ("displays", "passes", "log_odds", "collapsed"),
    [
        ((500, 500, 500, 40), (500, 500, 500, 0), (-2, -2, -2, -5), 0),
        ((500, 500, 500, 50), (500, 500, 500, 0), (-2, -2, -2, -5), 0),
        ((500, 500, 500, 90), (500, 500, 500, 0), (-2, -2, -2, -5), 1),
        ((500, 500, 500), (450, 0, 450), (-2, 0, -2), 0),
        ((500, 500, 500), (450, 450, 450), (-2, -9, -2), 0),
        ((500, 500, 500), (0, 0, 0), (-2, -9, -2), 0),
    ],
    ids=["40 displays", "50 displays", "90 displays", "clicks only", "passes only", "nobody reports passes"],
)
def test_an_ad_is_unanswered_if_enough_displays_have_neither_clicks_nor_passes(displays, passes, log_odds, collapsed):
    metrics = Metrics()
    counts = counted(displays, passes)
    metrics.version(a_version(arms=len(displays), answers=counts, model=clicked(*log_odds)))
    assert len(metrics.trouble_lines()) == collapsed


def test_the_page_says_what_was_forgotten_and_when():
    metrics = Metrics()
    metrics.version(a_version(folds=1))
    assert document(metrics)["parameters"]["forgetting"] == {"setting": "auto", "time": None, "kept": None, "ads": []}
    changed = a_version(version=1, folds=2, kept=0.3, changed=("ad-1",), made_at=50_700_000)
    metrics.version(changed)
    assert metrics.registry.get_sample_value("adcascade_kept_share") == 0.3
    metrics.version(replace(changed, version=2, made_at=50_800_000))  # an order: the last fold is the same
    metrics.version(a_version(version=3, folds=3, made_at=50_900_000))
    expected = {"setting": "auto", "time": 50_700_000, "kept": 0.3, "ads": ["ad-1"]}
    assert document(metrics)["parameters"]["forgetting"] == expected
    assert metrics.registry.get_sample_value("adcascade_kept_share") == 1.0
    fixed = replace(changed, version=4, folds=4, settings=replace(changed.settings, forgetting=0.99), kept=0.99)
    metrics.version(fixed)
    assert document(metrics)["parameters"]["forgetting"] == {"setting": 0.99, "time": None, "kept": None, "ads": []}


def test_a_change_of_the_users_is_noticed_and_has_a_time(monkeypatch):
    metrics = Metrics()
    runner = Embedded(traffic.settings(), traffic.ARMS, partitions=1, metrics=metrics)
    sent = traffic.arrivals(1500, seconds=100)
    half = traffic.START + 50_000
    traffic.deliver(runner, [one for one in sent if one.at < half], live=True)
    assert metrics.snapshot().forgotten is None
    monkeypatch.setattr(traffic, "TRUTH", -traffic.TRUTH)
    traffic.deliver(runner, [one for one in sent if one.at >= half], live=True)
    traffic.finish(runner)
    time, kept, ads = metrics.snapshot().forgotten
    assert time > half
    assert kept < 1 or ads
    noticed = [one.episode for one in metrics.snapshot().windows if one.episode.kept or one.episode.changed_arms]
    assert noticed[0].window_end == half + 10_000
    assert (kept, ads) == (noticed[-1].kept or 1, noticed[-1].changed_arms or ())
    shown = document(metrics)["parameters"]["forgetting"]
    assert (shown["time"], shown["kept"], shown["ads"]) == (time, kept, list(ads))


def test_the_page_says_which_features_matter(ran):
    metrics, _ = ran
    shown = document(metrics)["parameters"]
    assert shown["model"] == "personal"
    (strongest,) = shown["strongest"]
    assert strongest["feature"] == "x[1] … x[5]"
    assert strongest["strength"] > 0
    features = Features.of_table(
        {"context": {"age": "number", "device": ["mobile", "desktop"]}, "ads": {"price": "number"}}
    )
    first = Parameters.first(
        LearningSettings(dim=3, features=features),
        tuple(Arm(arm=name, reward=1.0, features={"price": price}) for name, price in (("a", 1), ("b", 2))),
    )
    assert document_of(first)["parameters"]["strongest"] == []
    known = replace(first.model.precision, information=np.stack([np.eye(4)] * 2))
    alike = document_of(replace(first, folds=1, model=replace(first.model, precision=known)))["parameters"]["strongest"]
    assert [(one["feature"], one["of"], one["word"]) for one in alike] == [
        ("price", "ad", "strong"),
        ("age", "context", "strong"),
        ("device", "context", "strong"),
    ]
    assert [one["strength"] for one in alike] == pytest.approx([1, 0.5**0.5, 0.5**0.5], rel=1e-4)
    plain = LearningSettings(dim=2, model="additive")
    assert document_of(replace(Parameters.first(plain, ()), folds=1))["parameters"]["strongest"] == []
