"""A log whose arrivals carry objects: verified, learned again and evaluated under the declaration of its versions."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson
import pytest

from worker.cli.main import main
from worker.embedded.runner import Embedded
from worker.logs.format import LogWriter
from worker.stream.events import ArmChange
from worker.stream.features import Features
from worker.stream.settings import Arm, LearningSettings

START, SECOND = 1_700_000_000_000, 1_000
DECLARED = Features.of_table(
    {
        "context": {"age": "number", "spent": "number", "device": ["mobile", "desktop"], "country": {"hashed": 3}},
        "crosses": [["spent", "age"], ["age", "device"], ["device", "country"]],
    }
)
ARMS = tuple(
    Arm(arm=f"ad-{k}", reward=1.0 + k, features={"price": 10.0 * k, "brand": "north" if k % 2 else "south"})
    for k in range(4)
)


class Recording(NamedTuple):
    """A recorded run."""

    path: str
    sha256: str
    folds: int


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """Record 600 users, 60 in every window of 10 seconds; some lack a number, one sends a text for a number."""
    path = tmp_path_factory.mktemp("named") / "log.jsonl"
    settings = LearningSettings(
        dim=DECLARED.dim,
        features=DECLARED,
        horizon=2,
        window=10 * SECOND,
        session_timeout=4 * SECOND,
        lateness=SECOND,
        random_share=0.5,
        policy="aucbbp",
    )
    with LogWriter(path) as log:
        runner = Embedded(settings, ARMS, partitions=2, tap=log)
        generator = np.random.default_rng(5)
        for window in range(10):
            for place in range(60):
                arrive(runner, generator, f"u{60 * window + place:04}", START + window * 10 * SECOND + place * 160)
            if window == 4:
                features: Any = {"price": 99.0, "brand": "west"}
                runner.order(ArmChange(arm="ad-new", reward=2.0, active=True, features=features))
            answer(runner, generator)
            runner.advance(START + (window + 1) * 10 * SECOND + 6 * SECOND)
        assert runner.tally.dead == {"invalid": 1}
        current = runner.learner.current
        assert current.standardisation is not None
        assert current.standardisation.exponent[:2].tolist() == [1.0, 0.0], "what users spend is skewed, their age not"
        assert (current.settings.dim, current.model.dim) == (7, 7 + 1 + 2 + 6)
        return Recording(str(path), current.sha256, current.folds)


def arrive(runner: Embedded, generator: np.random.Generator, name: str, at: int) -> None:
    context: dict[str, Any] = {"age": int(generator.integers(18, 80)), "spent": float(generator.lognormal(5, 2))}
    context |= {"device": str(generator.choice(["mobile", "desktop", "watch"])), "country": f"c{generator.integers(9)}"}
    for missing in generator.choice(list(context), int(generator.integers(0, 3)), replace=False).tolist():
        del context[missing]
    if name == "u0007":
        context["age"] = "31"
    body = {"session_id": name, "occurred_at": at, "context": context}
    runner.send(runner.topics.arrivals, orjson.dumps(body), key=name.encode(), timestamp=at)


def answer(runner: Embedded, generator: np.random.Generator) -> None:
    for key, value in runner.pump():
        decision = orjson.loads(value)
        clicked, at = bool(generator.random() < 0.4), decision["arrived_at"] + 50
        body = {
            "session_id": key.decode(),
            "occurred_at": at,
            "position": 1,
            "arm": decision["arm"],
            "clicked": clicked,
        }
        runner.send(runner.topics.clicks, orjson.dumps(body), key=key, timestamp=at)
    runner.pump()


def test_both_replays_reproduce_the_log(recording: Recording, capsys: Any) -> None:
    for how in ("--verify", "--relearn"):
        assert main(["replay", recording.path, how, "--json", "-"]) == 0
        report = orjson.loads(capsys.readouterr().out)
        assert report["mismatches"] == report["unverified"] == 0
        assert report["decisions"] > 599
        assert report["versions"][-1]["sha256"] == recording.sha256
    assert recording.folds == 9, "the first window had to wait for the second"


def test_arrivals_and_clicks_alone_are_learned_from_under_a_declaration(recording: Recording, tmp_path: Path) -> None:
    lines = [line for line in Path(recording.path).read_text().splitlines() if '"ads.arrivals"' in line[:200]]
    (tmp_path / "log.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "settings.toml").write_text(
        '[features.context]\nage = "number"\nspent = "number"\ndevice = ["mobile", "desktop"]\n'
        "country = { hashed = 3 }\n"
    )
    (tmp_path / "arms.csv").write_text("arm,reward,price,brand\na,1,3.5,north\nb,2,4,south\n")
    command = ["replay", str(tmp_path / "log.jsonl"), "--relearn", "--config", str(tmp_path / "settings.toml")]
    assert main([*command, "--catalog", str(tmp_path / "arms.csv"), "--json", str(tmp_path / "report.json")]) == 0
    report = orjson.loads((tmp_path / "report.json").read_bytes())
    assert report["sessions"] == 599


def test_another_policy_is_evaluated_on_the_log(recording: Recording, capsys: Any) -> None:
    assert main(["evaluate", recording.path, "--policy", "greedy", "--json", "-"]) == 0
    report = orjson.loads(capsys.readouterr().out)
    assert report["sessions"] == 417, "all but those of the warm-up, and those that were open at the end"
    methods = {one["method"]: one for one in report["estimates"]}
    assert methods["direct"]["revenue"]["estimate"] > 0
