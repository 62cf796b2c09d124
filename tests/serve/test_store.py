"""What a server keeps: the learner goes on where the newest version stands, and the log has every record once."""

from __future__ import annotations

import json
import shutil
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from tests.serve.folder import LEARNING, Served
from worker.cli.main import main
from worker.errors import FailedError, InputError
from worker.logs.format import LogReader
from worker.serve.recording import Recording
from worker.serve.server import decoded_lesson
from worker.serve.state import FILE, StateFolder
from worker.serve.store import ServeStore
from worker.stream.events import ArmChange, Command, Tag
from worker.stream.learner import Learner
from worker.stream.parameters import Parameters, decode_parameters


def offsets(log: Path) -> dict[str, list[int]]:
    """Return the offsets in a log, by topic."""
    with LogReader(log) as lines:
        records = [line.record for line in lines]
    return {topic: [r.offset for r in records if r.topic == topic] for topic in sorted({r.topic for r in records})}


def test_batches_become_sessions_journal_and_versions(tmp_path):
    with Served(tmp_path) as served:
        served.serve(0)
        status, _ = served.learn()
        assert status.position == 3
        assert [json.loads(bytes(one))["clicks"] for one in status.episodes] == [1]
        assert dict(served.state.sessions()) == {b"s0": b"value"}
        assert served.versions == [0, 1]


def test_a_learner_that_ended_before_its_lesson_was_kept_gives_it_again(tmp_path):
    with Served(tmp_path) as served:
        served.serve(0)
        lost = served.learner.fold()
    with Served(tmp_path) as served:
        status, _ = served.learn()
        assert status == lost
        served.serve(1)
    with Served(tmp_path) as served:
        status, _ = served.learn()
        assert [json.loads(bytes(one))["sessions"] for one in status.episodes] == [1]
        assert served.versions == [0, 1, 2]


def test_an_episode_that_made_no_version_is_kept_once(tmp_path):
    log = tmp_path / "log"
    with Served(tmp_path / "state", log) as served:
        served.serve(0)
        served.order(Command(action="freeze"))
        served.serve(1)
        assert len(served.learn()[0].episodes) == 2
    with Served(tmp_path / "state", log) as served:
        assert len(served.learn()[0].episodes) == 1  # that of the second window, from the version before
    assert offsets(log)["ads.episodes"] == [0, 1]


def test_a_refused_order_is_reported_with_its_offset(tmp_path):
    with Served(tmp_path) as served:
        served.order(
            ArmChange(arm="shoe", reward=2.0, active=True),
            Command(action="rollback", version=77),
            Tag(name="good", version=0),
            Tag(name="bad", version=77),
        )
        _, refused = served.learn()
        assert served.versions == [0, 1]
        assert [offset for offset, _ in refused] == [1, 3]
        assert "tag/good" in served.state.slots()


# ── the log ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("synchronise", [True, False])
@pytest.mark.parametrize("lost", [0, 1, 100])
def test_the_log_has_every_record_once_whatever_ended_the_process(tmp_path, lost, synchronise):
    log = tmp_path / "log"
    for number in range(3):
        with Served(tmp_path / "state", log) as served:
            served.serve(number, synchronise=synchronise)
            size = log.stat().st_size
            served.learn()
        if lost:  # what was written after that may not be there
            with log.open("r+b") as file:
                file.truncate(max(size, log.stat().st_size - lost))
    Served(tmp_path / "state", log).__exit__()
    assert offsets(log) == {
        "ads.clicks": [0, 1, 2],
        "ads.episodes": [0, 1, 2],
        "ads.journal": [*range(9)],
        "ads.parameters": [0, 1, 2, 3],
    }
    assert main(["replay", str(log), "--verify"]) == 0


def test_a_log_that_begins_later_begins_with_the_versions_that_it_needs(tmp_path):
    with Served(tmp_path / "state") as served:
        served.serve(0)
        served.learn()
    with Served(tmp_path / "state", tmp_path / "late.log") as served:
        served.serve(1)
        served.learn()
    assert main(["replay", str(tmp_path / "late.log"), "--verify"]) == 0


def test_a_log_that_was_moved_is_continued(tmp_path):
    with Served(tmp_path / "state", tmp_path / "log") as served:
        served.serve(0)
    (tmp_path / "log").rename(tmp_path / "moved")
    with Served(tmp_path / "state", tmp_path / "moved") as served:
        served.serve(1)
    assert offsets(tmp_path / "moved")["ads.clicks"] == [0, 1]


@pytest.mark.parametrize(
    "case", ["another file", "the log of another folder", "ahead", "behind", "changed", "left out"]
)
def test_a_file_that_is_not_the_log_of_the_folder_is_refused_and_stays_as_it_is(tmp_path, case):
    state, log, copy = tmp_path / "state", tmp_path / "log", tmp_path / "copy"
    with Served(state, log) as served:
        served.serve(0)
    shutil.copytree(state, copy)
    with Served(state, log) as served:
        served.serve(1, synchronise=True)
        served.serve(2)
    if case == "another file":
        log.write_text('{"hat": 1.0}')
    elif case == "the log of another folder":
        with Served(tmp_path / "other", tmp_path / "other.log") as served:
            served.serve(5)
        log = tmp_path / "other.log"
    elif case == "ahead":  # an older copy of the folder is restored
        state = copy
    elif case == "behind":
        log.write_bytes(log.read_bytes()[:-2_000])
    elif case == "changed":
        log.write_bytes(log.read_bytes().replace(b"hat", b"cap"))
    else:
        Served(state).__exit__()  # served without a log, which has a gap then
    content = log.read_bytes()
    with pytest.raises(InputError, match=f"--record {log}: this file exists, and is not the log"):
        Served(state, log)
    assert log.read_bytes() == content


# ── what is kept, and for how long ───────────────────────────────────────────────────────────────────────────────────

HALF_HOUR = 257  # sessions of `Served.serve`, about
HOUR, DAY = 3_600_000, 86_400_000


def served_for_hours(served: Served, numbers: range) -> dict[int, Parameters]:
    """Serve and learn from a session every half an hour; return the versions that came of it."""
    made = {}
    for number in numbers:
        served.serve(number * HALF_HOUR)
        for version in decoded_lesson(served.learn()[0]).versions:
            made[version.parameters.version] = version.parameters
    return made


def test_the_folder_keeps_the_journal_of_the_last_hours_and_every_version_of_them_comes_out_of_it_again(tmp_path):
    with Served(tmp_path, keep=4 * HOUR, learning=replace(LEARNING, standardise=False)) as served:
        made = served_for_hours(served, range(15))
        served.order(Command(action="rollback", version=10))  # which is gone later
        made |= served_for_hours(served, range(15, 20))
        newest = max(made)
        in_force = max(n for n in made if made[n].made_at <= made[newest].made_at - 4 * HOUR)
        assert made[in_force - 4].resume_offset <= served.state.journal_bounds()[0] <= made[in_force].resume_offset
        held = {kept.version: slot for slot, kept in served.state.slots().items()}
        assert len(held) < newest - 5, "not all are kept"
        for number in range(in_force, newest + 1):
            base = decode_parameters(served.state.in_slot(held[max(n for n in held if n <= number)]))
            learner = Learner(base.settings, base.arms, [base])
            again = [base, *learner.handle(list(served.state.journal(base.resume_offset))).versions]
            assert made[number].sha256 in [one.sha256 for one in again]


def test_a_folder_that_keeps_nothing_has_what_the_learner_needs(tmp_path):
    with Served(tmp_path, keep=DAY) as served:
        served_for_hours(served, range(3))
        assert served.state.journal_bounds()[0] == 0
    with Served(tmp_path, keep=0) as served:
        made = served_for_hours(served, range(3, 5))
        first, end = served.state.journal_bounds()
        assert first == min(made[5].resume_offset, end - 1) > 0
    with Served(tmp_path) as served:
        assert list(served_for_hours(served, range(5, 6))) == [6]


def parts(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir() if file.name.startswith("log-"))


def test_a_log_goes_on_in_a_new_file_after_a_day_and_old_parts_are_deleted(tmp_path):
    log = tmp_path / "log"
    (tmp_path / "log-backup").write_text("not a part")
    (tmp_path / "log-20231101T000000Z.gz").write_bytes(b"a part that was compressed")
    with Served(tmp_path / "state", log, keep_record=2 * DAY) as served:
        for number in range(12):  # half a day and four seconds apart, from 22:13:25 on November 14th on
            served.serve(number * (DAY // 14_000 + 1), synchronise=True)
            served.learn()
    assert parts(tmp_path) == ["log-20231117T221349Z", "log-20231118T221357Z", "log-backup"]
    assert offsets(log)["ads.clicks"] == [11]
    assert main(["replay", str(log), "--verify"]) == 0, "a part alone"


@pytest.mark.parametrize("written", [None, 0, 1000, 10**9], ids=["renamed", "kept", "half", "written"])
def test_the_parts_of_a_log_have_every_record_once_wherever_a_kill_comes(tmp_path, capsys, monkeypatch, written):
    log, state, tomorrow = tmp_path / "log", tmp_path / "state", DAY // 7_000 + 1
    (tmp_path / "log-20231114T221325Z").write_text("")  # the name of the part is taken
    with Served(state, log, keep_record=30 * DAY) as served:
        served.serve(0, synchronise=True)
        served.learn()
        write, begin = Recording.write, ServeStore._begin_log

        def killed(store: ServeStore, log: Recording) -> None:
            if written is None:
                raise KeyboardInterrupt
            begin(store, log)
            monkeypatch.setattr(Recording, "write", write_a_part)

        def write_a_part(recording: Recording, *, synchronise: bool) -> None:
            recording._unwritten = recording._unwritten[:written]
            write(recording, synchronise=False)
            raise KeyboardInterrupt

        monkeypatch.setattr(ServeStore, "_begin_log", killed)
        with pytest.raises(KeyboardInterrupt):
            served.serve(tomorrow, synchronise=True)
    monkeypatch.undo()
    with Served(state, log, keep_record=30 * DAY) as served:
        served.serve(tomorrow + 1, synchronise=True)
        served.learn()
    assert parts(tmp_path) == ["log-20231114T221325Z", "log-20231114T221326Z"]
    whole = tmp_path / "whole"
    whole.write_bytes(b"".join((tmp_path / name).read_bytes() for name in [*parts(tmp_path), "log"]))
    found = offsets(whole)
    assert found["ads.clicks"] == [0, 1, 2]
    assert sorted(set(found["ads.journal"])) == list(range(9))
    assert main(["replay", str(whole), "--verify"]) == 0, capsys.readouterr().out


def test_a_log_that_cannot_be_written_is_a_failure(tmp_path):
    with pytest.raises(FailedError, match="--record"):
        Served(tmp_path / "state", tmp_path / "nowhere" / "log")


# ── folders ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_folder_of_another_release_is_refused_in_one_line_that_says_how_to_go_on(tmp_path, capsys):
    with Served(tmp_path) as served:
        served.state.set_meta("format", b"1")
        served.state.commit()
    for command in ("serve --port 0", "arms list"):
        assert main([*command.split(), "--state", str(tmp_path)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "format 1" in line
        assert "replay LOG --relearn" in line


def test_a_database_of_something_else_is_refused(tmp_path):
    with sqlite3.connect(tmp_path / FILE) as other:
        other.execute("CREATE TABLE meta (name TEXT)")
    other.close()
    with pytest.raises(InputError, match="is not a state file of adcascade"):
        StateFolder(tmp_path)
