"""The metrics: names by the rules of Prometheus, closed label sets, accounts that balance in every scrape."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from prometheus_client import generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from tests.metrics.episodes import WINDOW, an_episode
from tests.programs import needs
from tests.stream.test_lift import drawn
from worker.metrics.catalogue import CATALOGUE, CONSUMED, IDENTITIES, MOST_ADS
from worker.metrics.history import DURATION_BOUNDS, MOST_MARKS, MOST_WINDOWS, Histogram
from worker.metrics.observer import Metrics
from worker.simulation.demo.run import Demo, DemoSettings
from worker.simulation.users import Habits
from worker.stream.accounts import ROWS, Accounts, Sums
from worker.stream.events import DEAD_LETTER_REASONS
from worker.stream.lift import Lift
from worker.stream.parameters import Parameters
from worker.stream.settings import Arm, LearningSettings
from worker.stream.topology import Emits, Tally

UNTIDY = Habits(silence=0.1, leaving=0.05, disordered=0.3, duplicates=0.3, poison=0.2, prefetching=0.4)


def run(metrics: Metrics, *, episodes: int = 3, steps: int | None = None) -> Demo:
    demo = Demo(DemoSettings(users=50, episodes=episodes), habits=UNTIDY, metrics=metrics)
    while not demo.finished and steps != 0:
        demo.step()
        steps = None if steps is None else steps - 1
    return demo


@pytest.fixture(scope="module")
def ran() -> tuple[Metrics, Demo]:
    metrics = Metrics(CONSUMED)
    metrics.learning(here=True)
    return metrics, run(metrics, episodes=5)  # so long that some ad has displays enough for an answer rate


def samples(metrics: Metrics) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Return all samples as a scraper reads them: name → labels → value."""
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in parse_text(generate_latest(metrics.registry).decode()):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


def total(metrics: Metrics, name: str) -> float:
    return sum(samples(metrics)[name].values())


# ── names and labels ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("spec", CATALOGUE, ids=lambda spec: spec.name)
def test_names_follow_the_rules_of_prometheus(spec):
    assert re.fullmatch(r"adcascade_[a-z][a-z0-9_]*", spec.name)
    assert spec.name.endswith("_total") == (spec.kind == "counter")
    assert not re.search(r"_(ms|milliseconds|minutes|kb|percent)(_|$)", spec.name), "base units only"
    assert spec.help.endswith(".")


def test_metrics_and_catalogue_agree_on_names_and_label_values(ran):
    metrics, demo = ran
    found = samples(metrics) | lift_series(demo)
    ads = {arm.arm for arm in demo.parameters.arms}
    assert [family.name for family in metrics.registry.collect()] == [
        spec.name.removesuffix("_total") if spec.kind == "counter" else spec.name for spec in CATALOGUE
    ]
    assert len({spec.name for spec in CATALOGUE}) == len(CATALOGUE)
    for spec in CATALOGUE:
        if spec.kind == "histogram":
            continue
        for labels in found[spec.name]:
            assert [name for name, _ in labels] == sorted(spec.labels)
            assert all(value in (ads if name == "arm" else spec.labels[name]) for name, value in labels)


def lift_series(demo: Demo, gain: float = 1.3, **changes: bool) -> dict[str, Any]:
    """Return the series where there is a control group, and the active troubles."""
    metrics, lift = Metrics(), Lift(control="fixed").plus(drawn(np.random.default_rng(0), 40_000, gain=gain)[0], 0)
    metrics.version(replace(demo.parameters, lift=lift, **changes))
    series = {name: found for name, found in samples(metrics).items() if name.startswith("adcascade_lift")}
    return {**series, "troubles": metrics.trouble_lines()}


def test_the_lift_is_in_the_series_and_a_certain_loss_is_trouble(ran):
    _, demo = ran
    earning, losing = lift_series(demo), lift_series(demo, 0.5, guarded=True)
    assert [len(earning[f"adcascade_lift{of}"]) for of in ("", "_per_session", "_sessions")] == [6, 4, 2]
    assert earning["troubles"] == []
    assert [line.partition(":")[0] for line in losing["troubles"]] == ["loss", "guarded"]
    assert "your order 0.2" in losing["troubles"][0]


def test_both_text_formats_can_be_parsed(ran):
    metrics, _ = ran
    plain = {f.name for f in parse_text(generate_latest(metrics.registry).decode())}
    opened = {f.name for f in parse_openmetrics(openmetrics.generate_latest(metrics.registry).decode())}
    assert plain == opened


def test_promtool_reports_no_problem(ran):
    metrics, _ = ran
    promtool = needs("promtool", package="prometheus")
    text = generate_latest(metrics.registry)
    checked = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, b"")


def test_positions_beyond_the_last_label_share_one():
    metrics = Metrics()
    tally = Tally()
    tally.clicks.update({1: 3, 20: 2, 21: 5, 400: 1})
    metrics.add(tally)
    clicks = samples(metrics)["adcascade_clicks_total"]
    assert clicks[("position", "more"),] == 6
    assert clicks[("position", "20"),] == 2


def test_ads_have_the_sums_of_the_newest_version_those_with_the_highest_revenue_if_there_are_many():
    arms = tuple(Arm(arm=f"ad-{k}", reward=1.0) for k in range(MOST_ADS + 5))
    sums = Sums(sessions=7, ads=np.add.outer(1000 * np.arange(len(ROWS)), np.arange(len(arms))))
    metrics = Metrics()
    metrics.version(replace(Parameters.first(LearningSettings(dim=1), arms), accounts=Accounts(total=sums)))
    found = samples(metrics)
    assert found["adcascade_ad_sessions_total"] == {(): 7}
    for row, name in enumerate(ROWS):
        expected = {(("arm", f"ad-{k}"),): 1000 * row + k for k in range(5, len(arms))}
        assert found[f"adcascade_ad_{name}_total"] == expected


# ── accounts ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def assert_balanced(found: dict[str, dict[tuple[tuple[str, str], ...], float]]) -> None:
    def value(name: str) -> float:
        return sum(found[f"adcascade_{name}"].values())

    assert value("arrivals_total") == value("arrivals_classified_total")
    opened = found["adcascade_arrivals_classified_total"][("class", "opened"),]
    assert opened + value("sessions_recovered_total") == (
        value("sessions_ended_total") + value("open_sessions") + value("sessions_handed_over_total")
    )
    assert value("feedback_received_total") + value("parked_recovered_total") == (
        value("feedback_total") + value("parked_records") + value("parked_handed_over_total")
    )


def test_the_accounts_balance_after_disorder_duplicates_and_poison(ran):
    metrics, demo = ran
    found = samples(metrics)
    assert_balanced(found)
    assert total(metrics, "adcascade_open_sessions") == sum(task.open_sessions for task in demo.embedded.tasks)
    assert total(metrics, "adcascade_parked_records") == sum(task.parked for task in demo.embedded.tasks)
    assert {labels[0][1] for labels in found["adcascade_accounting_imbalance"]} == set(IDENTITIES)
    assert total(metrics, "adcascade_accounting_imbalance") == 0
    dead = {labels[0][1]: value for labels, value in found["adcascade_dead_letters_total"].items() if value}
    assert dead == demo.embedded.tally.dead
    assert set(dead) <= set(DEAD_LETTER_REASONS)
    classes = found["adcascade_feedback_total"], found["adcascade_arrivals_classified_total"]
    assert sum(dead.values()) == sum(by_class[("class", "dead"),] for by_class in classes)


def test_an_imbalance_is_reported(caplog: pytest.LogCaptureFixture):
    metrics = Metrics()
    metrics.add(Tally(arrivals=3, opened=2, feedback=4, applied=1))
    for _ in range(2):
        metrics.census([SimpleNamespace(open_sessions=1, parked=3), SimpleNamespace(open_sessions=0, parked=0)])
    assert [record.args for record in caplog.records] == [{"arrivals": 1, "sessions": 1}]
    assert samples(metrics)["adcascade_accounting_imbalance"] == {
        (("identity", "arrivals"),): 1,
        (("identity", "sessions"),): 1,
        (("identity", "feedback"),): 0,
    }


def test_a_scrape_during_work_shows_whole_batches():
    metrics = Metrics()
    done = Event()
    scrapes = []

    def scrape() -> None:
        while not done.is_set():
            scrapes.append(samples(metrics))

    thread = Thread(target=scrape)
    thread.start()
    try:
        run(metrics, episodes=1)
    finally:
        done.set()
        thread.join()
    assert len(scrapes) > 3
    for found in scrapes:
        assert_balanced(found)
    for name in (spec.name for spec in CATALOGUE if spec.kind == "counter"):
        values = [sum(found.get(name, {}).values()) for found in scrapes]
        assert values == sorted(values), f"{name} fell"


# ── values ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_metrics_of_a_run_match_its_windows(ran):
    metrics, demo = ran
    rows = demo.rows
    assert total(metrics, "adcascade_episodes_closed_total") == len(rows)
    assert total(metrics, "adcascade_episode_sessions_total") == sum(row.episode.sessions for row in rows)
    assert total(metrics, "adcascade_pseudo_regret_total") == pytest.approx(sum(row.worth.regret for row in rows))
    assert total(metrics, "adcascade_oracle_reward_total") == pytest.approx(sum(row.worth.oracle for row in rows))
    explored = sum(row.episode.explored for row in rows)
    assert total(metrics, "adcascade_explored_sessions_total") == pytest.approx(explored)
    assert total(metrics, "adcascade_reward_total") == pytest.approx(demo.embedded.tally.reward)
    assert total(metrics, "adcascade_decisions_total") == demo.embedded.tally.decisions.total()
    assert total(metrics, "adcascade_parameters_version") == demo.parameters.version == len(rows)
    assert total(metrics, "adcascade_parameters_timestamp_seconds") == demo.parameters.made_at / 1000
    assert total(metrics, "adcascade_watermark_timestamp_seconds") == demo.time / 1000
    assert total(metrics, "adcascade_arrival_to_decision_seconds_count") == demo.embedded.tally.opened
    assert total(metrics, "adcascade_decision_duration_seconds_count") == demo.embedded.tally.decisions.total()


def test_without_a_true_model_there_is_no_pseudo_regret():
    metrics = Metrics()
    metrics.episode(an_episode())
    found = samples(metrics)
    assert not {name for name in found if "pseudo" in name or "oracle" in name}
    totals = [found[f"adcascade_regret_{kind}_total"][()] for kind in ("bound", "posterior")]
    assert totals == pytest.approx([3.0, 2.0])


def test_totals_of_regret_never_fall():
    metrics = Metrics()
    metrics.episode(an_episode())
    metrics.episode(an_episode(regret_bound=0.1, regret_posterior=-1e-6, rejected="no"))
    metrics.episode(an_episode(regret_bound=None, regret_posterior=None))
    found = samples(metrics)
    assert found["adcascade_regret_bound_total"][()] == pytest.approx(4.0)
    assert found["adcascade_regret_posterior_total"][()] == pytest.approx(2.0)
    assert found["adcascade_rejected_folds_total"][()] == 1


def test_a_bucket_counts_the_values_at_or_below_its_bound():
    histogram = Histogram(DURATION_BOUNDS)
    histogram.observe(0.001, times=3)
    histogram.observe(0.0011)
    histogram.observe(9.0)
    buckets = dict(histogram.buckets())
    assert (buckets["0.001"], buckets["0.0025"], buckets["1.0"], buckets["+Inf"]) == (3, 4, 4, 5)
    assert histogram.sum == pytest.approx(9.0041)


def test_a_batch_without_decisions_has_a_size_but_no_duration():
    metrics = Metrics()
    metrics.batches([Emits()], records=7, seconds=0.5)
    found = samples(metrics)
    assert found["adcascade_decision_duration_seconds_count"][()] == 0
    assert found["adcascade_batch_records_sum"][()] == 7


def test_lag_is_shown_for_the_consumed_topics_only():
    assert "adcascade_consumer_lag_records" not in samples(Metrics())  # of serve and demo, which consume nothing
    metrics = Metrics(CONSUMED)
    metrics.consumer_lag("clicks", 12)
    assert samples(metrics)["adcascade_consumer_lag_records"] == {
        (("topic", topic),): 12.0 if topic == "clicks" else 0.0 for topic in CONSUMED
    }


# ── history ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_history_has_a_bounded_size():
    metrics = Metrics()
    for number in range(1, 2_000):
        metrics.episode(an_episode(number))
        metrics.watermark(number * WINDOW)
    snapshot = metrics.snapshot()
    assert len(snapshot.windows) == MOST_WINDOWS
    assert snapshot.since.time == (2_000 - MOST_MARKS) * WINDOW
    assert snapshot.windows[-1].episode.window_end == 1_999 * WINDOW


def test_a_window_reported_twice_is_kept_once():
    metrics = Metrics()
    for number in (1, 2, 1, 2, 3):
        metrics.episode(an_episode(number))
    assert [window.episode.window_end for window in metrics.snapshot().windows] == [WINDOW, 2 * WINDOW, 3 * WINDOW]


def test_a_snapshot_does_not_change():
    metrics = Metrics()
    metrics.batches([Emits(tally=Tally(arrivals=1, opened=1))], 1, 0.1)
    before = metrics.snapshot()
    metrics.batches([Emits(tally=Tally(arrivals=1, opened=1))], 1, 0.1)
    metrics.episode(an_episode())
    assert (before.now.tally.arrivals, before.windows, before.numbers["episodes_closed"]) == (1, (), 0)
    assert before.now.histograms["batch_records"][()].sum == 1
