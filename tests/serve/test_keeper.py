"""The learner process, in this process: what it keeps, where it goes on, and what the log has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from worker.cli.main import main
from worker.embedded.state import StateFolder
from worker.embedded.steps import Recorded, Step
from worker.errors import FailedError
from worker.logs.format import LogReader
from worker.serve.learner import StateKeeper
from worker.stream.encoding import encode_journal, encode_progress
from worker.stream.events import ArmChange, Command, FeedbackFact, Opened, Progress, Tag
from worker.stream.settings import Arm, LearningSettings
from worker.stream.topology import Topics

START = 1_700_000_000_000
ARMS = [Arm(arm="hat", reward=1.0)]  # one, so that every slate is known
LEARNING = LearningSettings(dim=1, horizon=1, warmup=1, window=1_000, session_timeout=1_000, lateness=100)


def keeper(state: StateFolder, record: Path | None = None) -> StateKeeper:
    return StateKeeper(state, LEARNING, ARMS, topics=Topics(), record=record)


def served(number: int, start: int) -> Step:
    """Return a step with a session that is opened, shown one ad, and clicked, and progress to the end of its window."""
    name, at = f"s{number}", START + 10_000 * number
    facts = (
        Opened(
            session_id=name,
            arrived_at=at,
            context=(0.5,),
            slate=("hat",),
            modes=("warmup",),
            exclude=(),
            parameters_version=0,
        ),
        FeedbackFact(session_id=name, occurred_at=at + 1, position=1, arm="hat", clicked=True),
    )
    progress = encode_progress(Progress(partition=0, partitions=1, time=at + 5_000))
    return Step(
        time=at + 5_000,
        journal_start=start,
        journal=(*((name.encode(), encode_journal(fact)) for fact in facts), (None, progress)),
        sessions=((name.encode(), b"value"),),
        inputs=(Recorded("ads.clicks", number, name.encode(), b"{}"),),
        progress=at + 5_000,
    )


def ordered(order: ArmChange | Command | Tag, start: int) -> Step:
    return Step(time=START, journal_start=start, journal=((None, encode_journal(order)),), has_orders=True)


def test_steps_become_sessions_journal_and_versions(tmp_path):
    with StateFolder(tmp_path) as state:
        keeping = keeper(state)
        assert keeping.begin().version == 0
        status = keeping.take([served(0, 0)], 100)
        assert (status.version, status.kept, status.position) == (1, 100, 3)
        assert [json.loads(bytes(one))["clicks"] for one in status.episodes] == [1]
        assert dict(state.sessions()) == {b"s0": b"value"}
        assert [json.loads(one)["version"] for one in state.parameters()] == [0, 1]


def test_a_process_that_ended_before_it_committed_does_its_work_again(tmp_path):
    with StateFolder(tmp_path) as state:
        keeping = keeper(state)
        keeping.begin()
        keeping.take([served(0, 0)], 100)
        state.append_journal([(3, b"not committed")])
    with StateFolder(tmp_path) as state:
        keeping = keeper(state)
        status = keeping.begin()
        assert (keeping.position, status.version, status.position, status.episodes) == (100, 1, 3, ())
        status = keeping.take([served(1, 3)], 200)
        assert status.version == 2
        assert [json.loads(bytes(one))["sessions"] for one in status.episodes] == [1]


def test_the_log_has_every_record_once_whatever_ended_the_process(tmp_path):
    log = tmp_path / "log"
    for number in range(3):
        with StateFolder(tmp_path / "state") as state:
            keeping = keeper(state, log)
            keeping.begin()
            keeping.take([served(number, 3 * number)], 100 * (number + 1))
            keeping.close()
        with log.open("ab") as file:
            file.write(b'{"topic": "ads.journal", "partition')  # written, and not kept
    with StateFolder(tmp_path / "state") as state:
        keeper(state, log).close()
    with LogReader(log) as lines:
        records = [line.record for line in lines]
    offsets = {
        topic: [record.offset for record in records if record.topic == f"ads.{topic}"]
        for topic in ("journal", "clicks", "episodes", "parameters")
    }
    assert offsets == {"journal": [*range(9)], "clicks": [0, 1, 2], "episodes": [0, 1, 2], "parameters": [0, 1, 2, 3]}
    assert main(["replay", str(log), "--verify"]) == 0


def test_a_log_that_begins_later_begins_with_the_versions_that_it_needs(tmp_path):
    with StateFolder(tmp_path / "state") as state:
        keeping = keeper(state)
        keeping.begin()
        keeping.take([served(0, 0)], 100)
    with StateFolder(tmp_path / "state") as state:
        keeping = keeper(state, tmp_path / "late.log")
        keeping.begin()
        keeping.take([served(1, 3)], 200)
        keeping.close()
    assert main(["replay", str(tmp_path / "late.log"), "--verify"]) == 0


def test_a_log_that_cannot_be_written_is_a_failure(tmp_path):
    with StateFolder(tmp_path / "state") as state, pytest.raises(FailedError, match="--record"):
        keeper(state, tmp_path / "nowhere" / "log")


def test_a_refused_order_is_reported_with_its_offset(tmp_path):
    with StateFolder(tmp_path) as state:
        keeping = keeper(state)
        keeping.begin()
        steps = [
            ordered(ArmChange(arm="shoe", reward=2.0, active=True), 0),
            ordered(Command(action="rollback", version=77), 1),
            ordered(Tag(name="good", version=0), 2),
            ordered(Tag(name="bad", version=77), 3),
        ]
        status = keeping.take(steps, 100)
        assert status.version == 1
        assert [offset for offset, _ in status.refused] == [1, 3]
        assert "tag/good" in state.slots()
