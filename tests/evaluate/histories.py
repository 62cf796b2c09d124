"""Histories of other systems with a known truth: tables of displays, imported as logs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from worker.bandit.arrays import Floats, Ints
from worker.cli.main import main
from worker.simulation.environments import make_environment
from worker.simulation.world import Environment
from worker.simulation.worth import Valuer


def value(world: Environment, slate: Sequence[int]) -> float:
    """Return the revenue per session of one slate for everybody."""
    contexts = world.contexts(np.random.default_rng(2), 200_000)
    return float(Valuer(world, horizon=len(slate)).values(contexts, np.tile(slate, (len(contexts), 1))).mean())


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """A system that shows up to H of K ads, each once.

    `served`: `fixed` shows the order of the catalogue; `uniform` draws; `softmax` draws by a guess of the log-odds,
    which is wrong; `some` is fixed for users with a negative feature, `lot` for a half of them by lot, and both draw
    for the others. `known`: whether the propensities are in the table; `wrong`: a factor on them.
    """

    served: str = "softmax"
    known: bool = True
    wrong: float = 1.0
    environment: str = "tastes"
    sessions: int = 4000
    arms: int = 5
    horizon: int = 3
    stay: float = 0.9
    seed: int = 0

    @property
    def world(self) -> Environment:
        generator = np.random.default_rng([self.seed, 1])
        return make_environment(self.environment, dim=3, arms=self.arms, stay=self.stay, generator=generator)

    def truth(self, order: tuple[int, ...] = ()) -> float:
        """The revenue per session of a fixed order."""
        return value(self.world, list(dict.fromkeys((*order, *range(self.arms))))[: self.horizon])

    def slates(self, contexts: Floats, generator: np.random.Generator) -> tuple[Ints, Floats]:
        """Return the slates and their propensities, each given the earlier positions: (n, H)."""
        scores = np.zeros((len(contexts), self.arms))
        if self.served == "softmax":
            scores = 0.4 * (self.world.log_odds(contexts) + generator.standard_normal(self.arms))
        certain = np.full(len(contexts), self.served == "fixed")
        if self.served in ("some", "lot"):
            certain = (contexts[:, 0] if self.served == "some" else generator.standard_normal(len(contexts))) < 0
        scores[certain] -= 1e6 * np.arange(self.arms)
        arms, chances = np.zeros((2, len(contexts), self.horizon))
        rows = np.arange(len(contexts))
        for h in range(self.horizon):
            odds = np.exp(scores - scores.max(axis=1, keepdims=True))
            odds /= odds.sum(axis=1, keepdims=True)
            arm = (odds.cumsum(axis=1) > generator.random((len(rows), 1))).argmax(axis=1)
            arms[:, h], chances[:, h] = arm, odds[rows, arm]
            scores[rows, arm] = -np.inf
        return arms.astype(np.intp), chances

    def table(self) -> str:
        """Return the displays as CSV."""
        generator = np.random.default_rng([self.seed, 3])
        contexts = self.world.contexts(generator, self.sessions)
        slates, chances = self.slates(contexts, generator)
        clicked, answered = self.world.answers(contexts, slates, generator.random(slates.shape))
        displayed = np.where(clicked >= 0, clicked + 1, np.minimum(answered + 1, self.horizon))
        names = [arm.arm for arm in self.world.catalogue()]
        lines = [f"session,time,position,ad,clicked,x,y,z{',propensity' if self.known else ''}"]
        for row, context in enumerate(contexts.tolist()):
            for h in range(displayed[row]):
                propensity = [float(chances[row, h] * self.wrong)] if self.known else []
                cells = (f"s{row}", row, h + 1, names[slates[row, h]], int(clicked[row] == h), *context, *propensity)
                lines.append(",".join(map(str, cells)))
        return "\n".join(lines)

    def imported(self, folder: Path, content: str | None = None) -> str:
        """Import the table, or another one of these ads; return the path of the log."""
        table, catalogue, log = (folder / name for name in ("table.csv", "ads.csv", "log.jsonl"))
        table.write_text(content or self.table())
        catalogue.write_text("\n".join(["arm,reward", *(f"{arm.arm},{arm.reward}" for arm in self.world.catalogue())]))
        options = ["--context-columns", "x,y,z", "--catalog", str(catalogue), "--output", str(log)]
        assert main(["import", str(table), *options]) == 0
        return str(log)
