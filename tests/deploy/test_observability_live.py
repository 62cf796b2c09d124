"""A real Prometheus scrapes a live demo, and evaluates every query of the dashboard and the rules."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
import yaml

from tests.deploy.test_observability import RULES, dashboard_queries, rule_queries, rules
from tests.kafka.fleet import page
from tests.programs import eventually, free_port, needs
from worker.gateway.run import GATEWAY_CATALOGUE
from worker.http.metrics import HTTP_CATALOGUE

#: The demo serves no ads over HTTP, and has no consumer that could lag.
ABSENT = (*(spec.name for spec in (*HTTP_CATALOGUE, *GATEWAY_CATALOGUE)), "adcascade_consumer_lag_records")


def asked(url: str, **query: str) -> Any:
    """Query Prometheus; an invalid query returns its error, and one before it is up nothing."""
    status, text = page(f"{url}?{urlencode(query)}")
    return json.loads(text) if status else None


@contextmanager
def running(*command: str | Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [str(part) for part in command], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the address of a Prometheus that has scraped a running demo for some seconds."""
    program = needs("prometheus", package="prometheus")
    folder = tmp_path_factory.mktemp("prometheus")
    demo = ["demo", "--report", "none", "--users", "40", "--episodes", "100000", "--no-beside"]
    demo += ["--control-share", "0.5", "--control", "random"]
    with running(sys.executable, "-m", "worker", *demo) as simulated:
        assert simulated.stderr is not None
        target = simulated.stderr.readline().removeprefix("metrics: http://").removesuffix("/metrics\n")
        config = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(RULES)],
            "scrape_configs": [{"job_name": "adcascade", "static_configs": [{"targets": [target]}]}],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        address = f"127.0.0.1:{free_port()}"
        with running(
            program,
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={address}",
            "--log.level=error",
        ):
            url = f"http://{address}/api/v1"
            eventually(lambda: page(f"http://{address}/-/ready")[0] == 200, what="Prometheus is ready")
            # Rates need windows that closed between two scrapes.
            eventually(lambda: value(url, "min_over_time(adcascade_episodes_closed_total[5s]) > 2 and up offset 5s"))
            eventually(lambda: value(url, "adcascade_lift"), what="the lift is known")
            yield url


def value(url: str, query: str) -> list[Any]:
    answer = asked(f"{url}/query", query=query)
    assert answer["status"] == "success", f"{query}: {answer}"
    return list(answer["data"]["result"])


def test_every_query_of_the_dashboard_has_data(prometheus):
    for where, query in dashboard_queries():
        answer = value(prometheus, query.removesuffix(" > 0"))  # a panel that shows trouble only
        if any(name in query for name in ABSENT):
            continue
        assert answer, f"{where}: no data for {query}"
        if "adcascade_stage_seconds" in query:  # stages of a worker on Kafka; the demo has none
            continue
        numbers = [float(one["value"][1]) for one in answer]
        assert any(number == number for number in numbers), f"{where}: only NaN for {query}"


def test_every_rule_is_evaluated_and_none_fires_on_a_healthy_demo(prometheus):
    def evaluated() -> list[dict[str, Any]] | None:
        groups = asked(f"{prometheus}/rules")["data"]["groups"]
        found = [rule for group in groups for rule in group["rules"]]
        return found if all(rule["health"] != "unknown" for rule in found) else None

    found = eventually(evaluated)
    assert {rule["name"] for rule in found} == {rule["alert"] for rule in rules()}
    assert [rule["lastError"] for rule in found if rule["health"] != "ok"] == []
    assert [rule["name"] for rule in found if rule["state"] == "firing"] == []
    for _, query in rule_queries():
        value(prometheus, query)


def test_the_metrics_are_consistent(prometheus):
    def one(query: str) -> float:
        return float(value(prometheus, query)[0]["value"][1])

    assert one("adcascade_accounting_imbalance{identity='arrivals'}") == 0
    assert one("sum(adcascade_arrivals_classified_total) - sum(adcascade_arrivals_total)") == 0
    assert one("adcascade_regret_bound_total > adcascade_regret_posterior_total") > 0
    assert 0 < one("adcascade_pseudo_regret_total / adcascade_oracle_reward_total") < 1
    assert 0.3 < one("adcascade_reward_total / adcascade_expected_reward_total") < 1.2
    assert one("adcascade_learning") == 1
