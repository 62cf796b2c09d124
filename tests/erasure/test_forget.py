"""`adcascade forget` on logs and state folders: what is found, what is deleted, and that nothing else changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import orjson
import pytest

from tests.embedded.traffic import ARMS, SECOND, START, arrivals, deliver, finish, settings
from tests.serve.folder import FolderTap, Served
from worker.cli.main import main
from worker.embedded.runner import Embedded, Headers
from worker.logs.format import LogWriter
from worker.serve.recording import RECORD, LogOnDisk
from worker.serve.state import StateFolder
from worker.stream.parameters import Parameters, decode_parameters
from worker.stream.session import encode_state
from worker.stream.topology import Record

DAY = 86_400_000
TRAFFIC = arrivals(80, seconds=60)
#: Sessions of a user: one is learned in the middle of the traffic, one is still in the table, and its window open.
LEARNED, HELD = TRAFFIC[0].session, [one for one in TRAFFIC if one.at < START + 40 * SECOND][-1].session


def forget(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> Any:
    """Return what the command has found, or its error."""
    assert main(["forget", *map(str, arguments), "--json", "-"]) == code
    captured = capsys.readouterr()
    return captured.err if code else orjson.loads(captured.out)


class Traffic(NamedTuple):
    """All records of the traffic, the number of those of its first half, and the table and version after that."""

    records: list[tuple[Record, Headers]]
    half: int
    sessions: list[tuple[bytes, bytes | None]]
    newest: Parameters


@cache
def traffic() -> Traffic:
    """Serve the traffic."""
    records: list[tuple[Record, Headers]] = []
    runner = Embedded(settings(), ARMS, tap=lambda record, headers: records.append((record, headers)))
    for second in (False, True):
        part = [
            replace(one, value=one.value[:-1] + b',"user_id":"u 1"}') if one.session in (LEARNED, HELD) else one
            for one in TRAFFIC
            if (one.at >= START + 40 * SECOND) == second
        ]
        deliver(runner, part, live=True)
        if not second:
            half = len(records)
            held = [(name.encode(), encode_state(one)) for task in runner.tasks for name, one in task.table.items()]
    finish(runner)
    return Traffic(records, half, list(held), runner.versions.newest)


def serve(folder: Path, log: Path) -> None:
    """Make the folder and the log of a server after the first half of the traffic."""
    with LogWriter(log) as writer, FolderTap(folder, writer, keep=7 * DAY) as tap:
        for record, headers in traffic().records[: traffic().half]:
            tap(record, headers)
        tap.state.change_sessions(traffic().sessions)
        tap.state.set_meta(RECORD, msgspec.json.encode(LogOnDisk(str(log), 0, "", START)))


def learn_the_rest(folder: Path) -> Parameters:
    """Learn from the second half of the traffic; return the last version."""
    rest = [record for record, _ in traffic().records[traffic().half :] if record.topic == "ads.journal"]
    with Served(folder, keep=7 * DAY, learning=settings()) as served:
        served.store.add_journal([(None, record.value or b"") for record in rest])
        served.learn()
        return decode_parameters(served.state.parameters()[-1])


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the folder `state` and the log `log`, for tests that change neither."""
    folder = tmp_path_factory.mktemp("served")
    serve(folder / "state", folder / "log")
    return folder


def bytes_of(folder: Path) -> bytes:
    return b"".join(file.read_bytes() for file in folder.iterdir())


def test_a_person_leaves_a_state_folder_and_what_is_learned_stays_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state, log = tmp_path / "state", tmp_path / "log"
    serve(state, log)
    before = bytes_of(state)
    found = forget(capsys, "--user", "u 1", "--state", state, "--dry-run")
    assert (found["sessions"], found["deleted"]) == (sorted([LEARNED, HELD]), 0)
    sessions, journal, recorded = found["places"]
    assert (sessions["records"], sessions["deletable"]) == (1, 1)
    assert journal["records"] > journal["deletable"] > 0
    assert journal["note"].endswith("not learned yet: come again after the next window")
    assert recorded["name"] == str(log)
    assert recorded["records"] >= journal["records"] + 4, "with arrivals and decisions"
    assert recorded["until"] == START + DAY + 30 * DAY
    assert bytes_of(state) == before
    assert forget(capsys, "--user", "u 1", "--state", state, "--yes")["deleted"] == 1 + journal["deletable"]
    assert LEARNED.encode() not in bytes_of(state)
    again = forget(capsys, "--session", HELD, "--state", state, "--yes")
    assert [place["deletable"] for place in again["places"]] == [0, 0]

    assert learn_the_rest(state).sha256 == traffic().newest.sha256
    assert traffic().newest.version > 5
    forget(capsys, "--session", HELD, "--state", state, "--yes")
    assert HELD.encode() not in bytes_of(state)


def test_a_folder_in_use_is_searched_and_nothing_is_deleted(served: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--session", LEARNED, "--state", served / "state"]
    with StateFolder(served / "state"):
        found = forget(capsys, *asked, "--dry-run")
        error = forget(capsys, *asked, "--yes", code=1)
    assert error == f"adcascade: another process uses the state folder {served / 'state'}; stop it first\n"
    assert forget(capsys, *asked, "--dry-run") == found


def test_in_a_log_records_are_found_by_key_session_and_user(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log.gz"
    mine: Sequence[tuple[str, bytes | None, bytes | None]] = [
        ("ads.clicks", b"s", b'{"session_id":"s"}'),  # before its arrival
        ("ads.arrivals", None, b'{"session_id":"s","user_id":"u"}'),
        ("ads.dead-letters", b"x", b'{"session_id":7,"user_id":"u"}'),
        ("ads.journal", None, b'{"kind":"opened","session_id":"s"}'),
        ("ads.dead-letters", b"s", b"\xff"),
    ]
    others: Sequence[tuple[str, bytes | None, bytes | None]] = [
        ("ads.arrivals", b"t", b'{"session_id":"t","user_id":"v"}'),
        ("ads.arrivals", b"u", b'{"session_id":"u"}'),  # a session, and no user
        ("ads.dead-letters", None, b'{"session_id":["s"]}'),
        ("ads.journal", None, b'{"kind":"progress"}'),
        ("ads.parameters", b"1", b'{"version":1}'),
    ]
    with LogWriter(log) as writer:
        for number, (topic, key, value) in enumerate([*mine, *others]):
            writer(Record(topic, 0, number, 1000 + number, key, value))
    (place,) = forget(capsys, log, "--user", "u")["places"]
    assert (place["records"], place["first"], place["last"], place["until"]) == (5, 1000, 1004, None)
    assert main(["forget", str(log), *("--session", "s", "--session", "t", "--session", "nope")]) == 0
    assert capsys.readouterr().err == "there are no records of session 'nope'\n"
    assert forget(capsys, log, "--session", "s", "--session", "t")["places"][0]["records"] == 5
    log.write_bytes(log.read_bytes()[:-9])  # broken off
    (place,) = forget(capsys, log, "--session", "t")["places"]
    assert "lines cannot be read: the gzip data breaks off" in place["note"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["LOG"], "one of them is needed, and not both"),
        (["LOG", "--user", "u", "--session", "s"], "one of them is needed, and not both"),
        (["LOG", "--user", "nobody"], "there are no records of user 'nobody': is the id right?"),
        (["LOG", "--session", "s", "--state", "STATE"], "log and --state are several sources"),
        (["-", "--session", "s"], "name a file"),
        (["--session", "s"], "the source is missing: a log, --state DIR or --broker HOST:PORT"),
        (["--session", LEARNED, "--state", "STATE"], "--yes is missing"),
        (["STATE/state.sqlite3", "--session", "s"], "is not a log: line 1"),
    ],
)
def test_wrong_input_is_answered_with_one_line(
    served: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    paths = {"LOG": f"{served}/log", "STATE": f"{served}/state"}
    error = forget(capsys, *(paths.get(one, one.replace("STATE", paths["STATE"])) for one in arguments), code=2)
    assert message in error
    assert error.count("\n") == 1


def test_without_a_log_the_sessions_of_a_user_have_to_be_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with FolderTap(tmp_path) as tap:
        Embedded(settings(), ARMS, tap=tap)
    assert "no log of --record: name the sessions" in forget(capsys, "--user", "u", "--state", tmp_path, code=2)
