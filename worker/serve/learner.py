"""The learner process of `adcascade serve`: it reads the journal of the state folder and folds it.

The serving process is the only writer of the folder: it gets versions, episodes and tags as reports, and keeps them
(`worker.serve.store`). So this process may end at any time. The next one goes on from the newest version kept.
"""

from __future__ import annotations

import os
import time
from typing import Final

import msgspec

from worker.runtime.learner_process import MOST_RECORDS, NICE, REPORT_INTERVAL, LearnerStatus
from worker.runtime.process import report
from worker.runtime.settings import ProcessSettings
from worker.serve.state import StateView
from worker.serve.store import ServeSettings
from worker.stream.learner import Learner, Outcome
from worker.stream.parameters import decode_parameters
from worker.stream.version_records import encode_parameters

#: Seconds between two looks at the journal; a report of every few records would keep both processes busy.
PAUSE: Final = 0.25


class JournalFolder:
    """Folds the journal of a state folder from where the newest version stands."""

    def __init__(self, state: StateView, settings: ProcessSettings) -> None:
        history = [decode_parameters(value) for value in state.parameters()]
        self._state = state
        learning, _ = settings.with_tagged(history, state.slots, state.load).configured(history)
        self._learner = Learner(learning, settings.arms, history)
        self._learner.check_start(*state.journal_bounds())
        self._position = self._learner.resume_offset
        #: Whether there may be more records than were folded last.
        self.is_behind = True

    def fold(self) -> LearnerStatus | None:
        """Fold the next records; return the report, None if there are none."""
        records = list(self._state.journal(self._position, MOST_RECORDS))
        self.is_behind = len(records) == MOST_RECORDS
        if not records:
            return None
        outcome = self._learner.handle(records)
        self._position = records[-1][0] + 1
        return self.status(outcome)

    def status(self, outcome: Outcome | None = None) -> LearnerStatus:
        """Return a report, of what came of some records."""
        outcome = outcome or Outcome()
        return msgspec.structs.replace(
            LearnerStatus.of(self._learner, self._position, outcome),
            versions=tuple(msgspec.Raw(encode_parameters(parameters)) for parameters in outcome.versions),
            tags=tuple(outcome.tags),
            refused=tuple((refusal.offset, refusal.reason) for refusal in outcome.refusals),
        )


def run_learner(settings: ServeSettings) -> None:
    """Fold and report for ever, under the settings of the server."""
    os.nice(NICE)
    with StateView(settings.folder) as state:
        journal = JournalFolder(state, settings)
        report(journal.status())
        reported = time.monotonic()
        while True:
            status = journal.fold()
            if status is None and time.monotonic() - reported >= REPORT_INTERVAL:
                status = journal.status()
            if status is not None:
                report(status)
                reported = time.monotonic()
            if not journal.is_behind:
                state.checkpoint()  # here, because answers wait for the serving process
                time.sleep(PAUSE)
