"""The learner process of `adcascade serve`: it reads the steps, folds the journal, and keeps the state folder.

Rules that hold in this file:

- Sessions, journal, versions, the history, the length of the log and the position in the steps are committed in one
  transaction. So the process may end at any time and goes on where it stood; nothing is learned twice.
- Serving is told of a version when it is kept.
- The process belongs to the serving one: it inherits the lock of the folder, and ends when its standard input does.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from worker.embedded.history import StateHistory
from worker.embedded.state import InheritedLock, StateFolder
from worker.embedded.steps import Step, StepReader
from worker.errors import AdcascadeError
from worker.runtime.child import end_with_parent, report
from worker.runtime.learner_process import LearnerStatus
from worker.serve.recording import StateRecording
from worker.stream.catalogue import Refusal
from worker.stream.encoding import encode_episode
from worker.stream.learner import Learner, Outcome
from worker.stream.parameters import Parameters, decode_parameters
from worker.stream.settings import Arm, LearningSettings, ignored_scale
from worker.stream.topology import Topics
from worker.stream.version_records import encode_parameters
from worker.stream.versions import KEPT, Versions

log = logging.getLogger(__name__)

#: How much lower the priority of this process is; see `worker.kafka.learner`.
NICE: Final = 2
#: Seconds between two looks at the steps. Each is a transaction; while that goes to the disk, answers wait for theirs.
PAUSE: Final = 0.25
#: Seconds without steps after which the process reports all the same.
REPORT_INTERVAL: Final = 5.0

#: Names in the state folder.
POSITION: Final = "steps.position"
RUNNER: Final = "runner"
SERVE: Final = b"serve"
MOVED: Final = b"moved"
STEPS: Final = "steps"


class StateKeeper:
    """Takes steps into a state folder, and folds their journal."""

    def __init__(
        self,
        state: StateFolder,
        settings: LearningSettings,
        arms: Sequence[Arm],
        *,
        topics: Topics,
        record: Path | None = None,
    ) -> None:
        self._state = state
        state.set_meta(RUNNER, SERVE)
        history = [decode_parameters(value) for value in state.parameters()]
        if history and (line := ignored_scale(settings, history[-1].settings)):
            log.warning(line)
        self._learner = Learner(settings, arms, history)
        self._versions = Versions(history[0] if history else self._learner.current)
        for parameters in history[1:]:
            self._versions.learn(parameters)
        self._history = StateHistory(state)
        self._recording = None if record is None else StateRecording(record, state, topics)
        self.position = int(state.meta(POSITION) or b"0")
        self._time = int(state.meta("time") or b"0")
        first, self._journal_end = state.journal_bounds()
        self._learner.check_start(first, self._journal_end)

    def begin(self) -> LearnerStatus:
        """Fold what the folder has, publish version 0 if there is none; return the first report."""
        outcome = self._learner.begin()
        self._publish(outcome, 0)
        known = self._fold(list(self._state.journal(self._learner.resume_offset)))
        self._commit()
        return self._status([known], ())

    def take(self, steps: Sequence[Step], position: int) -> LearnerStatus:
        """Keep steps, up to a position, and fold their journal; return the report."""
        outcomes: list[Outcome] = []
        refused: list[tuple[int, str]] = []
        unread: list[tuple[int, bytes]] = []
        self._keep(steps)
        for step in steps:
            unread += _numbered(step)
            if step.has_orders:  # one by one, so that a refusal has its offset
                for record in unread:
                    outcome = self._fold([record])
                    refused += [(record[0], refusal.reason) for refusal in outcome.refusals]
                    outcomes.append(outcome)
                unread = []
        outcomes.append(self._fold(unread))
        self.position = position
        self._commit()
        return self._status(outcomes, refused)

    def close(self) -> None:
        """Close the log."""
        if self._recording is not None:
            self._recording.close()

    def _keep(self, steps: Sequence[Step]) -> None:
        """Keep steps in the folder. Of what they set again and again, the last is kept: they are one transaction."""
        state = self._state
        numbered = [record for step in steps for record in _numbered(step)]
        sessions: dict[bytes, bytes | None] = {}
        offsets: dict[str, int] = {}
        for step in steps:
            sessions.update(step.sessions)
            offsets.update(step.offsets)
            self._time = max(self._time, step.time)
            if self._recording is not None:
                self._recording.add_step(step)
        state.append_journal(numbered)
        state.change_sessions(list(sessions.items()))
        progress = next((step.progress for step in reversed(steps) if step.progress), 0)
        if progress:
            state.set_meta("time", b"%d" % progress)
        for topic, offset in offsets.items():
            state.set_meta(f"offset.{topic}", b"%d" % offset)
        if numbered:
            self._journal_end = numbered[-1][0] + 1

    def _fold(self, records: list[tuple[int, bytes]]) -> Outcome:
        outcome = self._learner.handle(records)
        self._publish(outcome, self._time)
        return outcome

    def _publish(self, outcome: Outcome, now: int) -> None:
        for episode in outcome.episodes:
            if self._recording is not None:
                self._recording.add_episode(episode.version, encode_episode(episode), now)
        for parameters in outcome.versions:
            self._publish_version(parameters, now)
        for _, tag in outcome.tags:
            if not self._history.tag(tag, self._versions.history):
                outcome.refusals.append(Refusal(order=tag, reason=f"version {tag.version} is not kept"))

    def _publish_version(self, parameters: Parameters, now: int) -> None:
        value = encode_parameters(parameters)
        needed = min(parameters.resume_offset, self._journal_end)
        self._state.put_parameters(parameters.version, value, kept=KEPT, needed=needed)
        self._versions.learn(decode_parameters(value))
        self._history.keep(self._versions.history)
        if self._recording is not None:
            self._recording.add_version(parameters.version, value, now)

    def _commit(self) -> None:
        if self._recording is not None:
            self._recording.finish()
        self._state.set_meta(POSITION, b"%d" % self.position)
        self._state.commit()

    def _status(self, outcomes: Sequence[Outcome], refused: Sequence[tuple[int, str]]) -> LearnerStatus:
        return LearnerStatus(
            position=self._journal_end,
            watermark=self._learner.watermark,
            slowest=self._learner.slowest_partition,
            late=sum(outcome.late for outcome in outcomes),
            episodes=tuple(msgspec.Raw(encode_episode(one)) for outcome in outcomes for one in outcome.episodes),
            troubles=tuple(trouble for outcome in outcomes for trouble in outcome.troubles),
            version=self._learner.current.version,
            kept=self.position,
            refused=tuple(refused),
        )


def _numbered(step: Step) -> list[tuple[int, bytes]]:
    """Return the journal records of a step with their offsets."""
    return [(step.journal_start + index, value) for index, (_, value) in enumerate(step.journal)]


def run_learner(
    folder: str,
    lock: int,
    *,
    topics: Topics,
    learning: LearningSettings,
    arms: tuple[Arm, ...],
    record: Path | None,
) -> int:
    """Keep and fold until the standard input ends; return 1 after a failure. `lock` is the open lock file."""
    os.nice(NICE)
    end_with_parent()
    try:
        with StateFolder(folder, lock=InheritedLock(lock), durable=True) as state:
            keeper = StateKeeper(state, learning, arms, topics=topics, record=record)
            report(keeper.begin())
            _follow(keeper, StepReader(Path(folder) / STEPS, keeper.position))
    except AdcascadeError as error:
        report(LearnerStatus(failure=str(error)))
    except Exception as error:
        log.exception("the learner failed")
        report(LearnerStatus(failure=f"{type(error).__name__}: {error}"))
    return 1


def _follow(keeper: StateKeeper, reader: StepReader) -> None:
    """Take steps as they come."""
    reported = time.monotonic()
    while True:
        steps = reader.read()
        if steps or time.monotonic() - reported >= REPORT_INTERVAL:
            report(keeper.take(steps, reader.position))
            reported = time.monotonic()
        time.sleep(PAUSE)
