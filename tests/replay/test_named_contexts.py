"""A log whose arrivals carry objects: verified, learned again and evaluated under the declaration of its versions."""

from __future__ import annotations

from math import exp
from pathlib import Path
from typing import Any

import orjson
import pytest

from worker.cli.main import main
from worker.logs.format import LogWriter
from worker.stream.events import ArmChange
from worker.stream.features import Features
from worker.stream.parameters import Parameters

from ..golden.recording import Run
from .logs import DEFAULTS, lines_of, of, write

CONTEXT = {"age": "number", "spent": "number", "device": ["mobile", "desktop"], "country": {"hashed": 3}}
DECLARED = Features.of_table(
    {"context": CONTEXT, "crosses": [["spent", "age"], ["age", "device"], ["device", "country"]]}
)
DESCRIBED = [
    (after, ArmChange(arm=f"ad-{k}", reward=1.0 + k, active=True, features={"price": 10.0 * k, "brand": brand}))
    for after, k, brand in ((100, 0, "south"), (100, 1, "north"), (45_000, 5, "west"))
]


class Named(Run):
    """Users with named features; some lack one, one sends a text for a number."""

    def _send(self, at: int, topic: str, name: str, value: bytes) -> None:
        if topic == self.topics.arrivals:
            document, number = orjson.loads(value), int(name.removeprefix("user-"))
            age, spent, _ = document["context"]
            context = {"age": 45 + 12 * age, "spent": exp(5 + 2 * spent), "country": f"c{number % 9}"}
            context["device"] = ("mobile", "desktop", "watch")[number % 3]
            if number % 4 == 0:
                del context[list(context)[number // 4 % 4]]
            if number == 7:
                context["age"] = "31"
            value = orjson.dumps({**document, "context": context})
        super()._send(at, topic, name, value)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Parameters]:
    """Record 600 users, 60 in every window of 10 seconds."""
    path = tmp_path_factory.mktemp("named") / "log.jsonl"
    settings = {"dim": DECLARED.dim, "features": DECLARED, "horizon": 2, "random_share": 0.5, "policy": "aucbbp"}
    with LogWriter(path) as log:
        run = Named(sessions=600, rate=6, seed=5, oddities=False, tap=log, settings=DEFAULTS | settings)
        runner = run.go(DESCRIBED)
    assert runner.tally.dead == {"invalid": 1}
    newest = runner.learner.current
    assert newest.standardisation is not None
    assert newest.standardisation.exponent[:2].tolist() == [1.0, 0.0], "what users spend is skewed, their age not"
    assert (newest.settings.dim, newest.model.dim) == (7, 7 + 1 + 2 + 6)
    return path, newest


def test_both_replays_reproduce_the_log(recorded: tuple[Path, Parameters], capsys: Any) -> None:
    path, newest = recorded
    for how in ("--verify", "--relearn"):
        assert main(["replay", str(path), how, "--json", "-"]) == 0
        report = orjson.loads(capsys.readouterr().out)
        assert report["mismatches"] == report["unverified"] == 0
        assert report["decisions"] > 599
        assert report["versions"][-1]["sha256"] == newest.sha256


def test_arrivals_and_clicks_alone_are_learned_from_under_a_declaration(recorded, tmp_path, capsys) -> None:
    log = write(tmp_path / "log.jsonl", of(lines_of(recorded[0]), "arrivals"))
    (tmp_path / "settings.toml").write_text(
        '[features.context]\nage = "number"\nspent = "number"\ndevice = ["mobile", "desktop"]\n'
        "country = { hashed = 3 }\n"
    )
    (tmp_path / "arms.csv").write_text("arm,reward,price,brand\na,1,3.5,north\nb,2,4,south\n")
    command = ["replay", log, "--relearn", "--config", str(tmp_path / "settings.toml")]
    assert main([*command, "--catalog", str(tmp_path / "arms.csv"), "--json", "-"]) == 0
    assert orjson.loads(capsys.readouterr().out)["sessions"] == 599


def test_another_policy_is_evaluated_on_the_log(recorded: tuple[Path, Parameters], capsys: Any) -> None:
    assert main(["evaluate", str(recorded[0]), "--policy", "greedy", "--json", "-"]) == 0
    report = orjson.loads(capsys.readouterr().out)
    assert report["served"]["sessions"] + report["warmup"] + sum(report["left_out"].values()) == 599
    methods = {one["method"]: one for one in report["estimates"]}
    assert methods["direct"]["revenue"]["estimate"] > 0
