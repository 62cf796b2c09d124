"""What an uncertain arm is worth beyond its estimate: the bonus that optimistic planning adds to Q_h(k)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import numpy as np

from worker.bandit.arrays import Array, Floats
from worker.errors import InputError


class Bonus(Protocol):
    """A rule for the bonus, from click probabilities f, widths, revenues e and continuation values V."""

    name: str

    def of(self, chances: Floats, widths: Floats, gains: Floats) -> Floats:
        """Return the bonus of each arm; `widths` are β·width, `gains` are e − V."""

    def scores(self, chances: Array, widths: Array, rewards: Array, continuations: Array) -> Iterator[Array]:
        """Yield, per step h, Q_h + bonus − V_{h+1}, (n, columns), in a buffer that is used again.

        `widths` are β·width and may be overwritten; `continuations` are V_1 … V_{H+1}, (n, H+1).
        """


class ValueBonus:
    """β·width·f(1−f)·max(e − V, 0): β posterior standard deviations of Q_h(k) by the delta method, with V fixed."""

    name = "value"

    def of(self, chances: Floats, widths: Floats, gains: Floats) -> Floats:
        return np.asarray(widths * chances * (1 - chances) * np.maximum(gains, 0.0))

    def scores(self, chances: Array, widths: Array, rewards: Array, continuations: Array) -> Iterator[Array]:
        # f(e−V) + βw·f(1−f)·max(e−V, 0). Some arm has e > V, and where e > V both terms share the factor e − V; an arm
        # with e ≤ V scores at most 0 either way. So one factor per arm serves every step.
        scores = np.subtract(1, chances)
        widths *= scores
        widths += 1
        widths *= chances
        for ahead in continuations.T[1:]:
            np.subtract(rewards, ahead[:, None], out=scores)
            scores *= widths
            yield scores


class PaperBonus:
    """β·width, the same whatever an arm can earn: as printed in the paper."""

    name = "paper"

    def of(self, chances: Floats, widths: Floats, gains: Floats) -> Floats:
        return widths

    def scores(self, chances: Array, widths: Array, rewards: Array, continuations: Array) -> Iterator[Array]:
        scores = np.empty_like(chances)
        for ahead in continuations.T[1:]:
            np.subtract(rewards, ahead[:, None], out=scores)
            scores *= chances
            scores += widths
            yield scores


BONUSES: Mapping[str, Bonus] = {bonus.name: bonus for bonus in (ValueBonus(), PaperBonus())}


def bonus_named(name: str) -> Bonus:
    """Return the bonus called `name`."""
    if name not in BONUSES:
        raise InputError(f"unknown bonus {name!r}; one of {', '.join(BONUSES)}")
    return BONUSES[name]
