"""What is done to the fleet and when, from a seed.

Variables:

- ``ADCASCADE_HOSTILE``: seconds of the whole test, about; `CALM` of them are for start, recovery and judgement.
- ``ADCASCADE_HOSTILE_SEED``: the seed. It is printed. The same seed gives the same plan. By default it is fixed for a
  run of the default length, and random for a longer one.
- ``ADCASCADE_HOSTILE_ONLY``: kinds of acts, separated by commas; all of them by default.
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

#: Seconds of the test without hostility: start of broker and workers, recovery, judgement.
CALM: Final = 55.0
LEAST: Final = 20.0
DEFAULT_SECONDS: Final = 90.0
DEFAULT_SEED: Final = 1
#: Mean seconds between two acts.
PACE: Final = 2.0

#: How often each kind of act occurs. See `hostilities.py` for what they do.
WEIGHTS: Final[Mapping[str, float]] = {
    "kill": 3,
    "kill-learner": 2,
    "pause": 2,
    "clock": 2,
    "broker": 1,
    "bomb": 1,
    "garbage": 4,
    "units": 2,
    "far-future": 1,
    "odd-keys": 2,
    "duplicates": 2,
    "forged": 2,
    "joiner": 1.5,
    "other-settings": 1.5,
    "other-dimension": 0.5,
}


@dataclass(frozen=True, slots=True)
class Act:
    """One act: when (seconds from the start), of which kind, and a seed of its own."""

    at: float
    kind: str
    seed: int


@dataclass(frozen=True, slots=True)
class Plan:
    """All acts of a run, in their order."""

    seed: int
    seconds: float
    acts: tuple[Act, ...] = field(repr=False)

    def __str__(self) -> str:
        return "\n".join(f"  {act.at:7.2f} s  {act.kind} (seed {act.seed})" for act in self.acts)


def make_plan(seed: int, seconds: float, kinds: list[str]) -> Plan:
    """Return a plan: every kind once, in random order, then at random by weight."""
    chance = random.Random(seed)
    first = chance.sample(kinds, len(kinds))
    weights = [WEIGHTS[kind] for kind in kinds]
    acts, at = [], 1.0
    while at < seconds:
        kind = first.pop() if first else chance.choices(kinds, weights)[0]
        acts.append(Act(round(at, 2), kind, chance.randrange(1 << 32)))
        at += chance.uniform(0.3, 1.7) * PACE
    return Plan(seed, seconds, tuple(acts))


def plan_of(environment: Mapping[str, Any] = os.environ) -> Plan:
    """Return the plan that the variables ask for."""
    length = environment.get("ADCASCADE_HOSTILE")
    seconds = max(LEAST, float(length or DEFAULT_SECONDS) - CALM)
    seed = int(environment.get("ADCASCADE_HOSTILE_SEED") or (random.randrange(1 << 32) if length else DEFAULT_SEED))
    only = [kind for kind in environment.get("ADCASCADE_HOSTILE_ONLY", "").split(",") if kind]
    unknown = set(only) - WEIGHTS.keys()
    if unknown:
        raise ValueError(f"unknown kinds of acts: {', '.join(sorted(unknown))}; some of {', '.join(WEIGHTS)}")
    return make_plan(seed, seconds, only or list(WEIGHTS))
