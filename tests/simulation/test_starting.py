"""A history of a fixed order, imported and started from: what it saves, and how soon a wrong one is overcome.

The order is that of the revenue of a click, over the ads whose campaigns run: 12 of 40, others every 200 sessions. With
ADCASCADE_THOROUGH=1, all figures are measured over ten worlds and printed (`-s`).
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from worker.bandit.arrays import Floats, sigmoid
from worker.cli.main import main
from worker.cli.options.parser import build_parser
from worker.cli.options.places import resolve
from worker.cli.options.process import start_of
from worker.cli.serve import COMMAND
from worker.console import say
from worker.logs.traces import opening
from worker.simulation.environments import make_environment
from worker.simulation.users import BEGINNING
from worker.simulation.world import Environment
from worker.simulation.worth import Valuer
from worker.stream.contexts import pack_context
from worker.stream.events import Arrival, FeedbackFact, Progress, encode_event
from worker.stream.learner import Learner
from worker.stream.parameters import Parameters
from worker.stream.settings import LearningSettings
from worker.stream.slates import SlatePlanner

ADS, RUNNING, HORIZON, DIM, FEATURES = 40, 12, 5, 6, 3
WINDOW: Final = 75  # sessions
CONTEXT = [f"x{column}" for column in range(1, DIM + 1)]
SETTINGS = LearningSettings(dim=DIM, horizon=HORIZON, session_timeout=10_000, lateness=1_000)


class Site:
    """A world with tastes, most of which features of ads explain; at each display a tenth of the users leaves."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        drawn = np.random.default_rng([seed, 1])
        self.world: Environment = make_environment(
            "tastes", dim=DIM, arms=ADS, generator=drawn, features=FEATURES, stay=0.9
        )
        assert self.world.features is not None
        described = [{f"f{n}": value for n, value in enumerate(row)} for row in self.world.features.tolist()]
        pairs = zip(self.world.catalogue(), described, strict=True)
        self.arms = tuple(replace(arm, features=tuple(features.items())) for arm, features in pairs)

    def started(self, folder: Path, impressions: int, *, flipped: bool = False) -> Parameters:
        """Return version 0 from a history, as `import` and `serve --start-from` make it."""
        table, log, ads = folder / "history.csv", folder / f"{self.seed}-{flipped}.gz", folder / "ads.csv"
        for path, rows in ((table, self._history(impressions, flipped)), (ads, self._catalogue())):
            with path.open("w", newline="") as file:
                csv.writer(file).writerows(rows)
        usual = ["--catalog", str(ads)]
        columns = ["--context-columns", ",".join(CONTEXT)]
        assert main(["import", str(table), "--output", str(log), *usual, *columns]) == 0
        start = start_of(resolve(build_parser(COMMAND, "adcascade serve").parse_args(["--start-from", str(log)])))
        assert start is not None
        return start.first(SETTINGS, None, self.arms)

    def _catalogue(self) -> Iterator[list[Any]]:
        yield ["arm", "reward", *dict(self.arms[0].features)]
        yield from ([arm.arm, arm.reward, *dict(arm.features).values()] for arm in self.arms)

    def _history(self, impressions: int, flipped: bool) -> Iterator[list[Any]]:
        drawn, order = np.random.default_rng([self.seed, 2]), np.argsort(-self.world.rewards)
        yield ["session", "time", "position", "ad", "clicked", *CONTEXT]
        session = shown = 0
        while shown < impressions:
            if session % 200 == 0:
                slate = order[np.isin(order, drawn.choice(ADS, RUNNING, replace=False))][:HORIZON]
            context = self.world.contexts(drawn, 1)
            chances = sigmoid(self.world.log_odds_of(context, slate[None]))[0]
            for position, (ad, chance) in enumerate(zip(slate.tolist(), chances, strict=True), start=1):
                clicked = (drawn.random() < chance) != flipped
                time = BEGINNING // 1000 - 10**7 + 60 * session + position
                yield [f"h{session}", time, position, self.arms[ad].arm, int(clicked), *context[0].tolist()]
                shown += 1
                if clicked or drawn.random() > self.world.stay[ad]:
                    break
            session += 1

    def losses(self, first: Parameters | None, sessions: int) -> tuple[Floats, Floats]:
        """Serve sessions, learning after every window; return what each lost against the oracle, and the oracle's."""
        drawn, valuer = np.random.default_rng([self.seed, 3]), Valuer(self.world, horizon=HORIZON, repeats=False)
        learner = Learner(SETTINGS, self.arms, first=first, with_episodes=False)
        indices, lost, best, offset = learner.current.indices, [], [], 0
        for start in range(BEGINNING, BEGINNING + sessions // WINDOW * SETTINGS.window, SETTINGS.window):
            planner, contexts = SlatePlanner(learner.current), self.world.contexts(drawn, WINDOW)
            moods = drawn.random((WINDOW, HORIZON))
            arrivals = [
                Arrival(session_id=f"{start}-{row}", occurred_at=start + row, context=tuple(context))
                for row, context in enumerate(contexts.tolist())
            ]
            slates = planner.plan(arrivals, [pack_context(arrival.context) for arrival in arrivals])
            shown = np.array([[indices[arm] for arm in slate.arms] for slate in slates])
            clicks, answered = self.world.answers(contexts, shown, moods)
            facts = []
            for arrival, slate, click, last in zip(arrivals, slates, clicks, answered.tolist(), strict=True):
                facts.append(opening(arrival, slate.arms, slate.modes, planner.parameters.version))
                if last:
                    seen = {"position": last, "arm": slate.arms[last - 1], "clicked": bool(click >= 0)}
                    facts.append(FeedbackFact(session_id=arrival.session_id, occurred_at=start + 900, **seen))
            facts.append(Progress(partition=0, partitions=1, time=start + SETTINGS.window + SETTINGS.grace))
            learner.handle((offset + number, encode_event(fact)) for number, fact in enumerate(facts))
            offset += len(facts)
            oracle = valuer.values(contexts, valuer.best_slates(contexts))
            best.append(oracle)
            lost.append(oracle - valuer.values(contexts, shown))
        return np.concatenate(lost), np.concatenate(best)


def share(run: tuple[Floats, Floats], first: int, end: int) -> float:
    """Return the share of the oracle's revenue that some sessions lost."""
    lost, best = run
    return float(lost[first:end].sum() / best[first:end].sum())


def test_a_small_history_saves_more_than_half_of_what_the_first_sessions_lose(tmp_path: Path) -> None:
    site = Site(1)
    cold, warm = (site.losses(first, 525) for first in (None, site.started(tmp_path, 12_000)))
    assert share(warm, 0, 500) < share(cold, 0, 500) / 2


@pytest.mark.thorough
def test_a_history_of_20_000_impressions_halves_the_loss_and_a_wrong_one_is_overcome(tmp_path: Path) -> None:
    rows = []
    for seed in range(10):
        site = Site(seed)
        cold, warm = site.losses(None, 6_000), site.losses(site.started(tmp_path, 20_000), 3_600)
        wrong = site.losses(site.started(tmp_path, 20_000, flipped=True), 6_000)
        parts = ((0, 500), (500, 3_000), (3_000, 3_600), (5_000, 6_000))
        rows.append([*(share(run, *part) for run in (cold, warm, wrong) for part in parts[: 3 + (run is not warm)])])
        say(" ".join([str(seed), *(f"{value:.3f}" for value in rows[-1])]))
    cold_early, _, cold_later, cold_late, early, _, later, *_, late = np.mean(rows, axis=0).tolist()
    assert early < cold_early / 2
    assert later < cold_later
    assert late < cold_late + 0.02
