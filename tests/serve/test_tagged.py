"""`adcascade serve --control tag:NAME`: what was learned before a restart, compared with what is learned after it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tests.replay.logs import journal, lines_of, payload
from tests.serve.process import Clients, ServeProcess
from worker.cli.main import main
from worker.serve.state import StateView
from worker.stream.contexts import pack_context
from worker.stream.events import Arrival
from worker.stream.parameters import Parameters, decode_parameters
from worker.stream.slates import SlatePlanner

TIMES = ("--window", "1s", "--session-timeout", "300ms", "--lateness", "200ms", "--deadline", "60s")
CONTROL = ("--control-share", "0.5", "--control", "tag:before")


def newest(state: Path) -> Parameters:
    with StateView(state) as view:
        return decode_parameters(view.parameters()[-1])


def learn(server: ServeProcess, done: Callable[[Parameters], bool], seed: int) -> Parameters:
    """Let users come until the newest version is such a one, then stop; return the newest version."""

    async def learned() -> None:
        while not done(newest(server.state)):  # noqa: ASYNC110 - the test has a deadline
            await asyncio.sleep(0.1)

    asyncio.run(Clients(server.url, seed).run(8, learned()))
    assert server.stop() == 0
    return newest(server.state)


def test_the_control_group_gets_what_was_tagged_while_learning_goes_on_with_a_new_ad(tmp_path: Path, capsys) -> None:
    with ServeProcess(tmp_path, *TIMES) as server:
        learn(server, lambda version: version.folds >= 2, seed=1)
        server.start()
        tag = ("parameters", "tag", "before", "--state", str(server.state))
        assert main([*tag]) == 0
        assert main(["arms", "add", "glove", "--reward", "9", *tag[-2:]]) == 0
        assert server.stop() == 0
        capsys.readouterr()
        assert main(["serve", "--state", str(server.state), *CONTROL[:3], "tag:after", "--port", "0"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "--control tag:after: there is no tag 'after'; the tags are before; `adcascade parameters tag" in line
    with StateView(server.state) as view:
        tagged = view.load("tag/before")
    assert tagged is not None
    with ServeProcess(tmp_path, *TIMES, *CONTROL) as server:
        carrying = learn(server, lambda version: version.lift is not None and version.lift.sessions > 0, seed=2)
        server.start()
        assert main([*tag, "--remove"]) == 0
        learn(server, lambda version: version.folds > carrying.folds + 1, seed=3)
    assert carrying.settings.tagged is not None
    assert carrying.settings.tagged.sha256 == newest(server.state).settings.tagged.sha256 == tagged.sha256
    greedy = SlatePlanner(replace(tagged, settings=replace(tagged.settings, policy="greedy", warmup=0)))
    gloves = 0
    for one in map(payload, journal(lines_of(server.log), "opened")):
        arrival = Arrival(session_id=one["session_id"], occurred_at=0, context=tuple(one["context"]))
        (slate,) = greedy.plan([arrival], [pack_context(arrival.context)])
        if "control" in one["modes"]:
            assert tuple(one["slate"]) == slate.arms
        gloves += "glove" in one["slate"]
    assert gloves > 10, "all others get what is known now"
    assert main(["replay", str(server.log)]) == 0
    capsys.readouterr()
    assert main(["parameters", "show", "--state", str(server.state), "--json", str(tmp_path / "shown.json")]) == 0
    assert "the version tagged before" in capsys.readouterr().out
    shown = json.loads((tmp_path / "shown.json").read_text())
    assert shown["settings"]["tagged"] == tagged.version
