"""The bench of the learner folds every session of its journal."""

from __future__ import annotations

import gc

from tests.embedded.traffic import ARMS, settings
from tests.kafka.golden import Golden
from worker.bench.learner import FIGURES, RecordedJournal, measure_learner


def test_every_figure_of_the_learner_is_measured_and_every_window_closed() -> None:
    journal = RecordedJournal.closed(Golden(20, seconds=8).values("journal"), settings(), ARMS)
    learner = journal.fold()
    assert learner.open_sessions == 0
    assert learner.current.observations > 0
    threshold = gc.get_threshold()
    figures = list(measure_learner(journal, journal, rounds=1))
    assert len(figures) == FIGURES
    assert all(figure.value > 0 for figure in figures)
    assert figures[0].least is not None
    assert figures[0].least <= 200_000
    assert f"of {journal.sessions:,} sessions" in figures[0].detail
    assert gc.get_threshold() == threshold
