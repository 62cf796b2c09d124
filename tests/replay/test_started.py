"""Runs whose version 0 started from a history: it is read from the log, and everything after it is made again."""

from __future__ import annotations

import pytest

from worker.errors import InputError
from worker.replay.relearn import relearn
from worker.replay.verify import verify
from worker.stream.settings import LearningSettings
from worker.stream.starting import started

from ..golden.recording import ARMS, SETTINGS, record
from .logs import Recorded, Replay, lines_of


@pytest.fixture(scope="module")
def run(plain: Recorded, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """A run that starts from what another one has learned, with half of its information."""
    path = tmp_path_factory.mktemp("started") / "log"
    first = started(plain.final, LearningSettings(**SETTINGS), ARMS, trust=0.5, sha256="7" * 64)
    newest = record(path, sessions=120, orders=(), seed=5, first=first).versions.newest
    assert newest.version > 2
    return Recorded(lines=lines_of(path), final=newest)


@pytest.mark.parametrize("how", [verify, relearn])
def test_a_run_that_started_from_a_history_is_reproduced(run: Recorded, replayed: Replay, how: Replay) -> None:
    report = replayed(run.lines, how)
    assert (report.mismatches, report.unfolded) == (0, 0)
    assert report.versions[-1].sha256 == run.final.sha256
    assert run.final.started_from is not None


def test_learning_again_under_other_settings_starts_from_the_same_history(run: Recorded, replayed: Replay) -> None:
    other = replayed(run.lines, relearn, changes={"beta": 1.0}).learned
    assert other is not None
    assert (other.settings.beta, other.started_from) == (1.0, run.final.started_from)
    assert other.model == run.final.model
    fewer = replayed(run.lines, relearn, arms=ARMS[:4]).learned
    assert fewer is not None
    assert (fewer.arms, fewer.started_from) == (ARMS[:4], run.final.started_from)
    with pytest.raises(InputError, match="a history of another model"):
        replayed(run.lines, relearn, changes={"intercept": True})
