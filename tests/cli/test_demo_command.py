"""`adcascade demo` on the command line."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from tests.programs import eventually
from worker.logs.format import LogReader
from worker.simulation.demo import report
from worker.stream.decoding import decode_decision

QUICK = "demo --episodes 3 --users 20 --report none"


# ── machines ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def is_gone(pid: int) -> bool:
    """Return whether there is no such process, or only the entry that its parent has not removed."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_json_on_standard_output_is_alone_there_and_complete(adcascade):
    code, out, err = adcascade(f"{QUICK} --json -")
    numbers = json.loads(out)
    assert code == 0
    assert set(numbers) >= {"sessions", "decisions", "clicks", "reward", "pseudo_regret", "parameters_version"}
    assert set(numbers["pseudo_regret"]) >= {"first_tenth", "last_tenth"}
    assert numbers["sessions"] > 30
    assert numbers["oracle_reward"] > numbers["served_reward"] > 0
    assert re.fullmatch(r"[0-9a-f]{64}", numbers["sha256"])
    assert (numbers["finished"], numbers["episodes"], numbers["imbalances"]) == (True, 3, {})
    assert len(err.splitlines()) <= 5


def test_a_fixed_order_is_of_ads_that_there_are(adcascade):
    assert "--order: there is no ad 'ad-1'" in adcascade(f"{QUICK} --policy fixed --order ad-1 --no-beside").err
    assert adcascade(f"{QUICK} --order ad-01").err.startswith("adcascade: --order is for --policy fixed")
    fixed = [adcascade(f"{QUICK} --policy fixed --order {order} --no-beside --json -") for order in ("ad-01", "ad-05")]
    assert fixed[0].json["served_reward"] != fixed[1].json["served_reward"]


def test_the_additive_model_serves_the_same_users_beside(adcascade):
    numbers = adcascade(f"{QUICK} --json -").json
    alone = adcascade(f"{QUICK} --json - --model additive").json
    assert numbers["additive"]["sha256"] == alone["sha256"] != numbers["sha256"]
    assert numbers["additive"]["revenue_share"] == alone["revenue_share"]
    assert alone["oracle_reward"] == numbers["oracle_reward"]
    assert alone["additive"] is None
    without = adcascade(f"{QUICK} --json - --no-beside").json
    assert (without["additive"], without["sha256"]) == (None, numbers["sha256"])


@pytest.mark.parametrize("environment", ["uniform", "rare", "tastes", "leaving"])
@pytest.mark.parametrize("policy", ["ucbbp --repeats", "epsilon-greedy"])
def test_every_environment_runs_with_any_policy(adcascade, environment, policy):
    ended = adcascade(f"{QUICK} --environment {environment} --policy {policy} --json - --dim 2 --arms 3")
    assert (ended.code, ended.json["parameters_version"]) == (0, 3)


@pytest.mark.parametrize("name", ["demo.log", "demo.log.gz"])
def test_the_log_has_the_records_of_every_topic(adcascade, tmp_path: Path, name):
    file = tmp_path / name
    numbers = adcascade(f"{QUICK} --record {file} --json - --users 60").json
    with LogReader(file) as log:
        lines = list(log)
    topics = Counter(line.record.topic for line in lines)
    assert topics["ads.arrivals"] == numbers["records"]["arrivals"]
    assert topics["ads.clicks"] == numbers["records"]["feedback"]
    assert topics["ads.decisions"] == numbers["decisions"]
    assert topics["ads.dead-letters"] == sum(numbers["dead_letters"].values()) > 0
    assert topics["ads.episodes"] == 3
    decisions = [decode_decision(line.record.value) for line in lines if line.record.topic == "ads.decisions"]
    assert {decision.position for decision in decisions} == set(range(1, 6))
    assert all(len(set(decision.slate)) == len(decision.slate) for decision in decisions), "no ad twice by default"


# ── people ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_pipe_gets_the_summary_and_a_few_lines(adcascade):
    code, out, err = adcascade(QUICK)
    assert code == 0
    assert out.startswith("adcascade demo: tastes, personal model, aucbbp, seed 0\n\nsessions")
    assert max(map(len, out.splitlines())) <= 80
    assert err.startswith("metrics: http://127.0.0.1:")
    assert len(err.splitlines()) <= 5
    assert "\x1b" not in out + err


def test_the_report_is_one_page_that_contains_its_plots(adcascade, tmp_path: Path):
    file = tmp_path / "report.html"
    code, out, _ = adcascade(f"{QUICK} --report {file}")
    assert code == 0
    assert out.splitlines()[-1] == f"report: {file}"
    page = file.read_text()
    assert page.count("<img ") == page.count('src="data:image/png;base64,') == 4
    assert not re.search(r'="(https?:)?//', page), "nothing from elsewhere"


def test_without_matplotlib_the_report_has_no_plots_and_names_the_package(adcascade, tmp_path: Path, monkeypatch):
    for module in (report, sys.modules["worker.cli.demo"]):
        monkeypatch.setattr(module, "can_draw", lambda: False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code, out, _ = adcascade(QUICK.removesuffix(" --report none"))
    assert code == 0
    assert "pip install 'adcascade[lab]'" in out
    (page,) = tmp_path.glob("adcascade-demo-*/report.html")
    assert "matplotlib" in page.read_text()


# ── wrong input ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_log_that_exists_is_refused(adcascade, tmp_path: Path):
    log = tmp_path / "log"
    log.write_text("precious")
    code, _, err = adcascade(f"{QUICK} --record {log}")
    assert code == 2
    assert f"{log}: this file exists" in err
    assert log.read_text() == "precious"


# ── as a process ───────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def process(*arguments: str, **more: Any) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "worker", "demo", "--report", "none", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more) as running:
        try:
            yield running
        finally:
            running.kill()


def wait_for(running: subprocess.Popen[str], beginning: str) -> str:
    """Read the lines of the process until one begins like this."""
    assert running.stderr is not None
    for line in running.stderr:
        if line.startswith(beginning):
            return line
    raise AssertionError(f"no line began with {beginning!r}")


# ── the process beside ───────────────────────────────────────────────────────────────────────────────────────────────


def child_of(running: subprocess.Popen[str]) -> int:
    """Return the id of the process that runs the additive model."""

    def found() -> list[str]:
        children = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text(encoding="ascii").split()
        return [child for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]

    return int(eventually(found)[0])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_metrics_are_served_until_a_signal_to_all_processes_ends_the_run_with_a_summary(number):
    with process("--episodes", "100", "--users", "5", "--json", "-", start_new_session=True) as running:
        url = wait_for(running, "metrics: ").split()[1]
        child = child_of(running)
        wait_for(running, " 25%")
        with urlopen(url, timeout=30) as answer:
            assert b"\nadcascade_pseudo_regret_total " in answer.read()
        os.killpg(running.pid, number)
        with suppress(ProcessLookupError):  # as systemd does, which knows all processes of a service
            os.kill(child, number)
        out, err = running.communicate(timeout=300)
    assert running.returncode == 128 + number
    assert [line for line in err.splitlines() if "%" not in line] == []  # it may have come further before the signal
    numbers = json.loads(out)
    assert (numbers["additive"], numbers["finished"]) == (None, False)
    assert 0 < numbers["episodes"] < 100
    eventually(lambda: is_gone(child))


def test_the_process_beside_ends_when_the_demo_is_killed():
    with process("--episodes", "4000", "--users", "5") as running:
        wait_for(running, "status page: ")
        child = child_of(running)
        running.kill()
        _, err = running.communicate(timeout=300)
    assert err == ""
    eventually(lambda: is_gone(child))


def test_the_death_of_the_process_beside_is_one_line_and_a_failure():
    with process("--episodes", "100", "--users", "5") as running:
        wait_for(running, "status page: ")
        os.kill(child_of(running), signal.SIGKILL)
        out, err = running.communicate(timeout=300)
    assert running.returncode == 1
    assert out == ""
    assert err.splitlines()[-1] == "adcascade: the additive run beside ended early; --no-beside leaves it out"
