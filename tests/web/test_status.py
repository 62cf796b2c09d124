"""What the status page is told."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path

import numpy as np
import pytest

from worker.bandit.model import Posterior
from worker.metrics import CONSUMED, Metrics
from worker.metrics.history import MOST_MARKS, MOST_WINDOWS
from worker.simulation.demo.run import Demo, DemoSettings
from worker.simulation.users import Habits
from worker.stream.events import Episode
from worker.stream.parameters import Arm, LearningSettings, Parameters
from worker.stream.topology import Emits, Tally
from worker.web.server import WebServer
from worker.web.status import (
    FILES,
    MOST_ARMS,
    MOST_LAG,
    columns,
    lately,
    positions,
    problems,
    quantile,
    status_routes,
    top_arms,
)

UNTIDY = Habits(silent=0.1, leaving=0.05, disordered=0.3, duplicated=0.3, poison=0.05, prefetching=0.4)


@pytest.fixture(scope="module")
def ran() -> tuple[Metrics, Demo]:
    metrics = Metrics()
    metrics.learning(here=True)
    demo = Demo(DemoSettings(users=40, episodes=8), habits=UNTIDY, watchers=[metrics])
    while not demo.finished:
        demo.step()
    return metrics, demo


def document(metrics: Metrics, **options: object) -> dict[str, object]:
    return json.loads(status_routes(metrics, **options)["/status.json"]({}).body)  # type: ignore[arg-type]


def an_episode(number: int, **changes: object) -> Episode:
    usual: dict[str, object] = {
        "version": number,
        "window_start": (number - 1) * 60_000,
        "window_end": number * 60_000,
        "sessions": 10,
        "displays": 20,
        "clicks": 3,
        "reward": 1.5,
        "expected_reward": 2.0,
        "explored": 2.5,
        "late": 0,
        "beta": 1.5,
        "explore_budget": 4,
        "thresholds": (0.1,),
        "regret_bound": 0.3,
        "regret_posterior": 0.2,
        "frozen": False,
    }
    return Episode(**{**usual, **changes})  # type: ignore[arg-type]


def a_version(arms: int = 2, **changes: object) -> Parameters:
    first = Parameters.first(
        LearningSettings(dim=2), tuple(Arm(arm=f"a{place}", reward=1.0 + place) for place in range(arms))
    )
    return replace(first, **changes)  # type: ignore[arg-type]


# ── the document ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_windows_shown_are_those_of_the_run(ran):
    metrics, demo = ran
    told = document(metrics, runner="demo")
    windows = told["windows"]
    assert windows["end"] == [row.episode.window_end for row in demo.rows]
    assert windows["sessions"] == [row.episode.sessions for row in demo.rows]
    assert windows["reward"] == pytest.approx([row.episode.reward for row in demo.rows], rel=1e-4)
    assert windows["oracle"] == pytest.approx([row.score.oracle for row in demo.rows], rel=1e-4)
    per_session = [(row.score.oracle - row.score.served) / row.score.sessions for row in demo.rows]
    assert windows["pseudo"] == pytest.approx(per_session, rel=1e-3, abs=1e-9)
    assert sum(windows["allowed"]) == pytest.approx(sum(row.allowed for row in demo.rows), rel=0.15)
    assert told["counters"]["decisions"] == demo.counts["decisions"]
    assert told["dead"] == demo.dead_letters
    assert told["parameters"]["version"] == demo.parameters.version
    assert told["simulated"] is True
    assert told["learning"]["windows"] == len(demo.rows)
    assert set(told["accounts"].values()) == {0.0}
    assert set(told["lag"]) == set(CONSUMED)


def test_a_process_that_has_seen_nothing_has_a_page_too():
    told = document(Metrics())
    assert told["windows"]["end"] == told["arms"] == told["positions"] == []
    assert told["parameters"] is None
    assert told["time"] is None
    assert [problem["text"] for problem in told["problems"]] == ["No parameters are known yet."]


def test_without_a_truth_there_is_no_pseudo_regret():
    metrics = Metrics()
    metrics.episode(an_episode(1))
    told = document(metrics)
    assert told["simulated"] is False
    assert told["windows"]["pseudo"] == [None]
    assert told["recent"]["pseudo"] is None
    assert told["recent"]["posterior"] == pytest.approx(0.2)


def test_numbers_that_are_not_finite_do_not_break_the_document():
    metrics = Metrics()
    metrics.episode(an_episode(1, regret_bound=float("inf"), expected_reward=float("nan")))
    assert document(metrics)["windows"]["expected"] == [None]


def test_an_answer_is_used_again_for_a_moment(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("worker.web.status.monotonic", lambda: now[0])
    metrics = Metrics()
    route = status_routes(metrics)["/status.json"]
    before = route({}).body
    metrics.add(Tally(arrivals=5, opened=5))
    assert route({}).body is before
    now[0] = 10.0
    assert json.loads(route({}).body)["counters"]["arrivals"] == 5


def test_history_is_bounded_however_long_it_runs():
    metrics = Metrics()
    for number in range(1, 2_000):
        metrics.episode(an_episode(number))
        metrics.watermark(number * 60_000)
    snapshot = metrics.snapshot()
    assert len(snapshot.windows) == MOST_WINDOWS
    assert len(snapshot.marks) == MOST_MARKS
    assert snapshot.windows[-1].end == 1_999 * 60_000
    assert len(json.dumps(columns(snapshot.windows))) < 60_000


def test_a_window_that_is_told_again_is_shown_once():
    metrics = Metrics()
    for number in (1, 2, 1, 2, 3):
        metrics.episode(an_episode(number))
    assert [window.end for window in metrics.snapshot().windows] == [60_000, 120_000, 180_000]


def test_a_snapshot_does_not_change_any_more():
    metrics = Metrics()
    metrics.batch(Emits(tally=Tally(arrivals=1, opened=1)), 1, 0.1)
    before = metrics.snapshot()
    metrics.batch(Emits(tally=Tally(arrivals=1, opened=1)), 1, 0.1)
    metrics.episode(an_episode(1))
    assert (before.now.tally.arrivals, before.windows, before.totals["episodes"]) == (1, (), 0)


def test_the_age_of_the_parameters_is_told_by_the_clock_if_there_is_one():
    metrics = Metrics()
    metrics.version(a_version(made_at=1_000_000))
    metrics.watermark(1_060_000)
    assert document(metrics)["parameters"]["age"] == 60_000
    assert document(metrics, clock=lambda: 1_005_000)["parameters"]["age"] == 5_000


# ── lately ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_click_rates_are_among_the_sessions_not_clicked_before():
    metrics = Metrics()
    metrics.version(a_version())
    tally = Tally(arrivals=100, opened=100)
    tally.clicks.update({1: 20, 3: 40})
    metrics.batch(Emits(tally=tally), 100, 0.01)
    rows = positions(metrics.snapshot())
    assert [(row["sessions"], row["clicks"]) for row in rows] == [(100, 20), (80, 0), (80, 40), (40, 0), (40, 0)]


def test_what_is_long_ago_is_not_lately():
    metrics = Metrics()
    metrics.version(a_version())
    metrics.watermark(0)
    old = Tally(arrivals=100, opened=100)
    old.clicks[1] = 90
    metrics.batch(Emits(tally=old), 100, 0.01)
    for minute in range(1, MOST_MARKS + 1):
        metrics.watermark(minute * 60_000)
    new = Tally(arrivals=50, opened=50)
    new.clicks[1] = 5
    metrics.batch(Emits(tally=new), 50, 0.01)
    snapshot = metrics.snapshot()
    rows = positions(snapshot)
    assert (rows[0]["sessions"], rows[0]["clicks"]) == (50, 5)
    assert (lately(snapshot)["span"], lately(snapshot)["read"]) == ((MOST_MARKS - 1) * 60_000, 50)


@pytest.mark.parametrize(
    ("counts", "share", "expected"),
    [
        ((10, 0, 0), 0.99, 1.0),
        ((50, 50, 0), 0.5, 1.0),
        ((50, 50, 0), 0.51, 2.0),
        ((0, 0, 9), 0.5, None),
        ((0,) * 3, 0.5, None),
    ],
)
def test_a_quantile_is_the_bound_that_holds_it(counts, share, expected):
    assert quantile((1.0, 2.0), counts, share) == expected


# ── arms ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_arms_that_earn_most_come_first_with_intervals_around_them():
    version = a_version(arms=30)
    arms = top_arms(version)
    assert len(arms) == MOST_ARMS
    assert [arm["arm"] for arm in arms[:3]] == ["a29", "a28", "a27"]
    assert all(0 < arm["low"] < arm["probability"] < arm["high"] < 1 for arm in arms)


def test_the_interval_narrows_where_more_is_known():
    version = a_version(arms=2)
    belief = version.posterior
    known = belief.precision.plus(
        np.zeros((1, 2)), sessions=np.zeros(500, np.intp), arms=np.ones(500, np.intp), weights=np.full(500, 0.25)
    )
    sharper = replace(
        version, posterior=Posterior(theta_context=belief.theta_context, theta_arms=belief.theta_arms, precision=known)
    )
    widths = {arm["arm"]: arm["high"] - arm["low"] for arm in top_arms(sharper)}
    assert widths["a1"] < widths["a0"] / 3


def test_retired_arms_come_last():
    version = a_version(arms=3)
    retired = replace(version.arms[2], active=False)
    arms = top_arms(replace(version, arms=(*version.arms[:2], retired)))
    assert [(arm["arm"], arm["active"]) for arm in arms] == [("a1", True), ("a0", True), ("a2", False)]


# ── problems ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def told(metrics: Metrics, unready: str | None = None, time: int = 0) -> str:
    return " ".join(problem["text"] for problem in problems(metrics.snapshot(), unready, time))


def test_a_run_that_is_well_has_no_problems():
    metrics = Metrics()
    metrics.version(a_version())
    assert told(metrics) == ""


def test_problems_are_told_in_words():
    metrics = Metrics()
    metrics.version(a_version(frozen=True))
    metrics.add(Tally(arrivals=3, opened=2))
    metrics.census(open_sessions=2, parked=0)
    metrics.refused()
    metrics.consumer_lag("clicks", MOST_LAG + 1)
    metrics.episode(an_episode(1, rejected="not finite"))
    text = told(metrics, unready="recovering")
    for part in ("Not ready: recovering", "arrivals +1", "two learners", "no usable", "records of clicks", "frozen"):
        assert part in text


def test_parameters_that_are_too_old_are_told():
    metrics = Metrics()
    metrics.version(a_version(made_at=1_000))
    assert told(metrics, time=600_000) == ""
    assert "11 minutes old" in told(metrics, time=661_000)


def test_many_dead_letters_are_told():
    metrics = Metrics()
    metrics.version(a_version())
    tally = Tally(arrivals=100, opened=98, dead_arrivals=2)
    tally.dead["norm"] = 2
    metrics.add(tally)
    assert "2.0% of the records" in told(metrics)


# ── the files ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_page_is_small_and_asks_nobody_else_for_anything():
    with WebServer(status_routes(Metrics())) as server:
        connection = HTTPConnection(server.host, server.port, timeout=10)
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
