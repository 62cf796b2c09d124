"""A state folder of `adcascade serve` goes on as topics on the real broker."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from tests.kafka.fleet import CommandLine, Fleet
from tests.programs import eventually
from tests.serve.process import ServeProcess
from worker.cli.main import main

pytestmark = pytest.mark.slow

SETTINGS = ("--dim", "2", "--horizon", "3", "--window", "1s", "--session-timeout", "5s", "--lateness", "500ms")


def ask(server: ServeProcess, path: str, body: Any) -> Any:
    with urlopen(Request(server.url + path, json.dumps(body).encode()), timeout=300) as response:
        return json.load(response)


def test_sessions_versions_and_what_is_not_learned_yet_go_to_kafka(
    fleet: Fleet, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / "served"
    folder.mkdir()
    with ServeProcess(folder, *SETTINGS[4:], "--deadline", "60s", "--progress-interval", "60s") as server:
        state = ["--state", str(server.state)]
        assert main(["arms", "add", "glove", "--reward", "9", *state]) == 0
        assert main(["parameters", "tag", "before", "0", *state]) == 0
        done = ask(server, "/v1/sessions", {"session_id": "done", "context": [1, 2]})
        ask(server, "/v1/sessions/done/feedback", {"position": 1, "arm": done["arm"], "clicked": True})
        first = ask(server, "/v1/sessions", {"session_id": "open", "context": [1, 2]})
        second = ask(server, "/v1/sessions/open/feedback", {"position": 1, "arm": first["arm"], "clicked": False})
        assert main(["topics", "import", str(server.state), *fleet.flags]) == 1
        assert "another process uses" in capsys.readouterr().err
        server.kill(everything=True)
    command = CommandLine(fleet, capsys)
    moved = command.json("topics", "import", str(server.state))
    assert (moved["version"], moved["sessions"]) == (1, 2)
    click = {"session_id": "open", "occurred_at": first["arrived_at"] + 1_000, "position": 2}
    click |= {"arm": second["arm"], "clicked": True}
    fleet.send_raw([(fleet.names.clicks, b"open", json.dumps(click).encode())])
    worker = fleet.serving(*SETTINGS)

    def learned(name: str) -> int:
        return sum(json.loads(episode.value)[name] for episode in fleet.read(fleet.names.episodes))

    # On a slow machine the two sessions are in two windows.
    eventually(lambda: learned("sessions") >= 2, what="the windows are closed")
    assert [learned(name) for name in ("sessions", "displays", "clicks")] == [2, 3, 2]
    newest = max((json.loads(one.value) for one in fleet.read(fleet.names.parameters)), key=lambda one: one["version"])
    assert "glove" in [arm["arm"] for arm in command.json("arms", "list")["arms"]]
    assert command.json("parameters", "rollback", "before")["version"] > newest["version"] - 1
    eventually(lambda: worker.balanced)
    assert main(["topics", "import", str(server.state), *fleet.flags]) == 2
    assert main(["serve", *state]) == 2
    assert "goes on there" in capsys.readouterr().err


def test_topics_that_are_in_use_are_not_written_to(
    fleet: Fleet, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / "served"
    folder.mkdir()
    with ServeProcess(folder, *SETTINGS[4:]) as server:
        assert server.stop() == 0
    fleet.send_raw([(fleet.names.journal, None, b"{}")])
    assert main(["topics", "import", str(server.state), *fleet.flags]) == 1
    assert "is not empty" in capsys.readouterr().err
    with server:
        assert server.stop() == 0  # it is served as before
