"""The test for what the model misses, in an experiment: the same sums as those of a version."""

from __future__ import annotations

import numpy as np

from worker.bandit.click_model import ClickModel, Observations
from worker.simulation.experiment.settings import FoundPair
from worker.simulation.world import Environment
from worker.stream.calibration import predict
from worker.stream.misfit import Misfit, evidence, misfit_after, missed
from worker.stream.settings import LearningSettings


class Misfits:
    """The sums of one run."""

    def __init__(self, world: Environment, model: str) -> None:
        assert world.declared is not None
        self._settings = LearningSettings(dim=world.declared.dim, features=world.declared, model=model)
        self._arms, self._interacting = len(world.rewards), world.interacting
        self._sums: Misfit | None = None
        self._alarms = 0

    def add(self, before: ClickModel, seen: Observations) -> None:
        """Add the displays of an episode, under the belief before it."""
        chances = predict(before, seen, np.zeros(len(seen), dtype=np.intp)).chances
        self._sums = misfit_after(self._sums, self._settings, seen, chances, arms=self._arms)
        self._alarms += bool(missed(evidence(self._sums, self._settings, self._arms)))

    def found(self) -> FoundPair | None:
        """Return the pair for which the evidence is strongest; None if nothing was tested."""
        tested = evidence(self._sums, self._settings, self._arms)
        if not tested:
            return None
        return FoundPair(is_true=tested[0].of in self._interacting, alarms=self._alarms)
