"""Recorded runs of the demo, and the true value of a target in its world."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from worker.bandit.arrays import NO_ARM, sigmoid
from worker.evaluate.planning import Assembled
from worker.logs.format import LogWriter
from worker.simulation.demo.run import Demo, DemoSettings
from worker.simulation.users import TIDY, Habits

#: A demo that draws a share of its sessions at random; `true_value` takes its contexts, N(0, I), as they are.
SMALL = DemoSettings(
    random_share=0.3,
    epsilon=0.1,
    standardise=False,
    environment="uniform",
    repeats=True,
    policy="ucbbp",
    users=120,
    episodes=16,
    arms=3,
    horizon=2,
    dim=3,
    seed=1,
)


def record(path: Path, habits: Habits = TIDY, **changes: Any) -> Demo:
    """Run a demo and record all topics."""
    with LogWriter(path) as log:
        demo = Demo(replace(SMALL, **changes), habits=habits, tap=log)
        while not demo.finished:
            demo.step()
    return demo


def true_value(demo: Demo, assembled: Assembled) -> float:
    """Return the revenue of the target per session after the warm-up."""
    sessions, truth, habits = assembled.sessions.part(~assembled.sessions.warmup), demo.world.truth, demo.users.habits
    scale = demo.parameters.standardisation
    contexts = sessions.contexts if scale is None else sessions.contexts * scale.scale + scale.centre
    stay = np.append(np.ones(truth.arms) if demo.world.stay is None else demo.world.stay, 1.0)
    slates = sessions.target
    chances = np.where(slates == NO_ARM, 0.0, sigmoid(truth.log_odds_of(contexts, slates)))
    value = np.zeros(len(slates))
    for h in range(slates.shape[1] - 1, -1, -1):
        missed = (1 - chances[:, h]) * stay[slates[:, h]] * value
        value = (1 - habits.leaving) * (chances[:, h] * demo.world.rewards[slates[:, h]] + missed)
    return (1 - habits.silence) * float(value.mean())
