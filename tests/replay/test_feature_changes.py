"""A log in which the declared features change twice under traffic: every arrival answered, reproduced to the bit."""

from __future__ import annotations

from math import exp
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import pytest

from worker.cli.main import main
from worker.embedded.runner import Embedded
from worker.logs.format import LogWriter
from worker.replay.verify import verify
from worker.stream.events import ArmChange, ArmEntry, CatalogueChange, FeaturesChange
from worker.stream.features import Features
from worker.stream.learner import Learner
from worker.stream.parameters import decode_parameters

from ..golden.recording import Run
from .logs import DEFAULTS, lines_of, of, payload, without, write


def table(context: dict[str, Any], crosses: list[list[str]], **ads: Any) -> Features:
    return Features.of_table({"context": context, "crosses": crosses, **ads})


FIRST = table(
    {"age": "number", "spent": "number", "device": ["mobile", "desktop"], "country": {"hashed": 3}},
    [["age", "device"], ["device", "country"]],
)
#: A value, a number, a cross and features of ads are added, a feature and a cross are dropped, one is renamed.
SECOND = table(
    {"device": ["mobile", "desktop", "watch"], "visits": "number", "paid": "number", "country": {"hashed": 3}},
    [["country", "device"], ["visits", "device"]],
    ads={"brand": ["north", "south"], "price": "number"},
)
#: A hashed category is resized, a value dropped, a number becomes a category, a feature of ads is dropped.
THIRD = table(
    {"device": ["desktop", "watch"], "visits": ["few", "many"], "paid": "number", "country": {"hashed": 5}},
    [["visits", "device"]],
    ads={"price": "number"},
)
DESCRIBED = CatalogueChange(
    changes=tuple(
        ArmEntry(arm=f"ad-{k}", reward=1.0 + k, active=True, features={"brand": ("north", "south")[k % 2], "price": k})
        for k in range(4)
    )
)
ORDERS = (
    (38_000, FeaturesChange(features=SECOND.document(), renamed={"spent": "paid"})),
    (44_000, FeaturesChange(features=FIRST.document(), renamed={"paid": "spent"})),  # too early
    (49_000, DESCRIBED),
    (52_000, ArmChange(arm="ad-4", reward=2.0, active=True)),  # has no features yet
    (78_000, FeaturesChange(features=THIRD.document())),
)


class Changing(Run):
    """Half of the clients use new names a second after the order, before the model does; half nine seconds later.

    Every fifth arrival comes again, perhaps when another version serves.
    """

    def _send(self, at: int, topic: str, name: str, value: bytes) -> None:
        if topic == self.topics.arrivals:
            document, number = orjson.loads(value), int(name.removeprefix("user-"))
            seconds = (document["occurred_at"] - 1_700_000_000_000) / 1000 + (-1 if number % 2 else -10)
            age, spent, visits = document["context"]
            amount, country = exp(5 + 2 * spent), f"c{number % 9}"
            device = ("mobile", "desktop", "watch")[number % 3]
            context: dict[str, Any] = {"device": device, "country": country}
            if seconds < 38:
                context |= {"age": 45 + 12 * age, "spent": amount}
            else:
                context |= {"paid": amount, "visits": visits if seconds < 78 else ("many" if visits > 0 else "few")}
            value = orjson.dumps({**document, "context": context})
            if number % 5 == 0:
                super()._send(at + 3_000, topic, name, value)
        super()._send(at, topic, name, value)


class Recorded(NamedTuple):
    """The log of a run, and its runner as it ended."""

    path: Path
    runner: Embedded


@pytest.fixture(scope="module", params=["personal", "additive"])
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """Record 1,200 users, 100 in every window of 10 seconds."""
    path = tmp_path_factory.mktemp("changing") / "log.jsonl"
    settings = {"dim": FIRST.dim, "features": FIRST, "horizon": 3, "random_share": 0.3, "policy": "aucbbp"}
    settings |= {"model": request.param}
    with LogWriter(path) as log:
        run = Changing(sessions=1200, rate=10, seed=5, oddities=False, tap=log, settings=DEFAULTS | settings)
        runner = run.go(ORDERS)
    return Recorded(path, runner)


def test_every_arrival_is_answered_and_learning_goes_on(recorded: Recorded) -> None:
    tally, newest = recorded.runner.tally, recorded.runner.versions.newest
    assert (tally.dead, tally.opened, tally.repeated) == ({}, 1200, 240)
    episodes = [payload(line) for line in of(lines_of(recorded.path), "episodes")]
    assert sum(one["sessions"] for one in episodes) == 1200
    assert [one for one in episodes if "rejected" in one] == []
    assert newest.folds == 11, "the first window has too few sessions for a scale"
    assert newest.settings.features is not None
    assert newest.settings.features.declared == THIRD
    reasons = [example for kind, _, example in tally.troubles if kind == "order-refused"]
    assert reasons == [
        "sessions under the features before version 3 may be open until 2023-11-14T22:14:19 UTC: give the order "
        "again then"
    ]


def test_a_learner_restarted_at_any_version_makes_the_same_versions(recorded: Recorded) -> None:
    lines = lines_of(recorded.path)
    published = [decode_parameters(line["payload"].encode()) for line in of(lines, "parameters")]
    journal = [(line["offset"], line["payload"].encode(), line["ts"]) for line in of(lines, "journal")]
    for index, version in list(enumerate(published))[1::3]:
        learner = Learner(version.settings, version.arms, published[: index + 1], with_episodes=False)
        made = learner.handle(journal[learner.resume_offset :]).versions
        assert [one.sha256 for one in made] == [one.sha256 for one in published[index + 1 :]]


@pytest.mark.parametrize("how", ["--verify", "--relearn"])
def test_both_replays_reproduce_the_log(recorded: Recorded, how: str, capsys: Any) -> None:
    assert main(["replay", str(recorded.path), how, "--json", "-"]) == 0
    report = orjson.loads(capsys.readouterr().out)
    assert report["mismatches"] == report["unverified"] == 0
    assert report["versions"][-1]["sha256"] == recorded.runner.versions.newest.sha256


def test_without_the_journal_decisions_are_checked_by_the_arrivals(recorded: Recorded, tmp_path: Path) -> None:
    report = verify(write(tmp_path / "log.jsonl", without(lines_of(recorded.path), "journal")))
    assert report.findings.count == 0
    assert report.modes.total() > 1200


def test_another_policy_is_evaluated_on_the_log(recorded: Recorded, capsys: Any) -> None:
    assert main(["evaluate", str(recorded.path), "--policy", "greedy", "--json", "-"]) == 0
    report = orjson.loads(capsys.readouterr().out)
    assert report["served"]["sessions"] + report["warmup"] + sum(report["left_out"].values()) == 1200
    assert report["left_out"].get("contradicts its version", 0) == 0


def test_learning_again_with_another_setting_reads_the_sessions_of_all_declarations(
    recorded: Recorded, capsys: Any
) -> None:
    assert main(["replay", str(recorded.path), "--relearn", "--ridge", "2", "--json", "-"]) == 0
    assert orjson.loads(capsys.readouterr().out)["sessions"] == 1200
