"""Dashboard and alert rules: valid, tested, and consistent with the catalogue of metrics."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.files import DEPLOY, documents
from tests.programs import needs
from worker.gateway.run import GATEWAY_CATALOGUE
from worker.http.metrics import HTTP_CATALOGUE
from worker.metrics.catalogue import CATALOGUE
from worker.stream.accounts import ROWS

#: The metrics of all processes: workers and simulated traffic, HTTP, gateways.
METRICS = (*CATALOGUE, *HTTP_CATALOGUE, *GATEWAY_CATALOGUE)
RULES = DEPLOY / "prometheus" / "alerts.yml"
DASHBOARD = json.loads((DEPLOY / "grafana" / "dashboards" / "adcascade.json").read_text())

#: Labels that Prometheus adds.
SCRAPED = {"job", "instance"}


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def dashboard_queries(scrape: int = 0) -> list[tuple[str, str]]:
    """Return (where, PromQL) of all panels, Grafana's variables filled in.

    With a `scrape` interval in seconds, ranges are those of a short time range: max($__interval + scrape, 4 · scrape),
    where $__interval is the minimum of the panel. Otherwise they are 10 s.
    """
    found = []
    for panel in panels():
        least = int(panel.get("interval", f"{scrape // 60}m").removesuffix("m")) * 60
        seconds = max(max(least, scrape) + scrape, 4 * scrape) if scrape else 10
        found += [(panel["title"], filled(target["expr"], f"{seconds}s")) for target in panel["targets"]]
    return found


def filled(query: str, rate_interval: str) -> str:
    for variable, value in (("$job", "adcascade"), ("$instance", ".*"), ("$__rate_interval", rate_interval)):
        query = query.replace(variable, value)
    assert "$" not in query, f"unknown variable: {query}"
    return query


def rule_queries() -> list[tuple[str, str]]:
    return [(rule["alert"], rule["expr"]) for rule in rules()]


QUERIES = [*dashboard_queries(), *rule_queries()]


def selectors(query: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the metrics of a query with their label matchers, which are regular expressions.

    >>> list(selectors('sum by (le) (rate(adcascade_a_bucket{x="1"}[5m])) > adcascade_b'))
    [('adcascade_a_bucket', {'x': '1'}), ('adcascade_b', {})]
    """
    for name, matchers in re.findall(r"(adcascade_\w+)\s*(?:\{([^}]*)\})?", query):
        yield name, dict(re.findall(r"(\w+)\s*(?:=~|=|!=|!~)\s*\"([^\"]*)\"", matchers))


def grouping_labels(query: str) -> set[str]:
    clauses = re.findall(r"\b(?:by|on|without|ignoring|group_left)\s*\(([^)]*)\)", query)
    return {label.strip() for clause in clauses for label in clause.split(",") if label.strip()}


def specs() -> dict[str, Any]:
    """Return the catalogue by series name."""
    known = {}
    for spec in METRICS:
        suffixes = ("_bucket", "_sum", "_count") if spec.kind == "histogram" else ("",)
        known |= {spec.name + suffix: spec for suffix in suffixes}
    return known


# ── names ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("where", "query"), QUERIES, ids=[where for where, _ in QUERIES])
def test_every_query_uses_existing_metrics_and_labels(where, query):
    known = specs()
    labels = set(SCRAPED)
    for name, matchers in selectors(query):
        assert name in known, f"{where}: there is no metric {name}"
        spec = known[name]
        labels |= set(spec.labels) | ({"le"} if spec.kind == "histogram" else set())
        for label, value in matchers.items():
            assert label in labels, f"{where}: {name} has no label {label}"
            found = label in SCRAPED or any(re.fullmatch(value, each) for each in spec.labels[label])
            assert found, f"{where}: {label} is never {value}"
    assert grouping_labels(query) <= labels


@pytest.mark.parametrize(("where", "query"), QUERIES, ids=[where for where, _ in QUERIES])
def test_counters_are_read_as_rates_and_gauges_are_not(where, query):
    known = specs()
    for name, _ in selectors(query):
        spec = known[name]
        if re.search(rf"\b(rate|increase)\(\s*{name}\b", query):
            assert spec.kind != "gauge", f"{where}: {name} is a gauge"
        elif spec.kind != "gauge":
            assert re.search(rf"\bsum\({name}\b", query), f"{where}: {name} only grows; take its rate or its sum"


def test_dashboard_and_rules_cover_every_metric():
    # Shown through related metrics.
    indirect = {
        "adcascade_sessions_handed_over_total",
        "adcascade_rounded_versions_total",
        "adcascade_parked_recovered_total",
        "adcascade_parked_handed_over_total",
    }
    used = {specs()[name].name for _, query in QUERIES for name, _ in selectors(query)}
    assert {spec.name for spec in METRICS} - used == indirect


# ── the dashboard ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_dashboard_uses_the_provisioned_data_source():
    (sources,) = documents(DEPLOY / "grafana/provisioning/datasources/prometheus.yml")
    asked = {target["datasource"]["uid"] for panel in panels() for target in panel["targets"]}
    asked |= {variable["datasource"]["uid"] for variable in DASHBOARD["templating"]["list"]}
    assert asked == {source["uid"] for source in sources["datasources"]}


#: Counters that move only when a window closes.
BY_WINDOW = (
    "regret_posterior_total",
    "regret_bound_total",
    "pseudo_regret_total",
    "oracle_reward_total",
    "explored_sessions_total",
    "episode_sessions_total",
    "episodes_closed_total",
    "predicted_clicks_total",
    "observed_clicks_total",
    *(f"ad_{name}_total" for name in ("sessions", *ROWS)),
)


def series_of_an_hour() -> Iterator[dict[str, str]]:
    """Yield the input of promtool: windows of 60 s, a scrape every 10 s, and steady traffic."""
    steps = 360
    for spec in METRICS:
        name = spec.name.removeprefix("adcascade_")
        if name in BY_WINDOW:
            values = " ".join(str(10 * (step // 6)) for step in range(steps))
        elif spec.kind == "gauge":
            values = f"2+10x{steps}" if name == "watermark_timestamp_seconds" else f"1x{steps}"
        else:
            values = f"0+10x{steps}"
        labels = dict.fromkeys(("job", "instance"), "adcascade") | {
            key: next(iter(of)) for key, of in spec.labels.items()
        }
        parts = [("_bucket", {"le": "1"}), ("_bucket", {"le": "+Inf"}), ("_sum", {}), ("_count", {})]
        for suffix, more in parts if spec.kind == "histogram" else [("", {})]:
            written = ", ".join(f'{key}="{value}"' for key, value in (labels | more).items())
            yield {"series": f"{spec.name}{suffix}{{{written}}}", "values": values}


def test_every_panel_has_a_value_at_every_time_with_windows_of_a_minute(tmp_path):
    """Counters that move once a window need ranges of two windows: shorter ones are 0, or 0 / 0."""
    checks = [
        {"expr": f"count(({query}) > 0) > bool 0", "eval_time": f"{1200 + second}s", "exp_samples": [{"value": 1}]}
        for _, query in dashboard_queries(scrape=10)
        for second in range(0, 120, 15)
    ]
    test = {"name": "an hour", "interval": "10s", "input_series": list(series_of_an_hour()), "promql_expr_test": checks}
    file = tmp_path / "panels.yml"
    file.write_text(yaml.safe_dump({"rule_files": [], "evaluation_interval": "15s", "tests": [test]}))
    assert "SUCCESS" in promtool("test", "rules", file)


# ── the rules ────────────────────────────────────────────────────────────────────────────────────────────────────────


def promtool(*arguments: str | Path) -> str:
    done = subprocess.run(
        [needs("promtool", package="prometheus"), *map(str, arguments)],
        cwd=RULES.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_promtool_accepts_the_configuration_and_the_rules():
    assert f"{len(rules())} rules found" in promtool("check", "rules", RULES)
    assert "SUCCESS" in promtool("check", "config", "prometheus.yml")


def test_every_rule_fires_when_it_should_and_only_then():
    """`alerts_test.yml` has a case of trouble for every rule, which begins after 10 minutes."""
    assert "SUCCESS" in promtool("test", "rules", "alerts_test.yml")
    compares_with_the_past = {"AdcascadeRegretRising", "AdcascadeRevenueBelowExpectation", "AdcascadeLearningFrozen"}
    fired = set()
    for test in yaml.safe_load((RULES.parent / "alerts_test.yml").read_text())["tests"]:
        for check in test["promql_expr_test"]:
            firing = set(re.findall(r'alertname="(\w+)"', str(check["exp_samples"])))
            fired |= firing
            if firing - compares_with_the_past:
                assert 10 < int(check["eval_time"].removesuffix("m")) <= 15, "within five minutes"
    assert fired == {rule["alert"] for rule in rules()}
