"""The learner with the personal model: tastes, answer rates, features of ads, and budgets of exploration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.stream.scenes import feedback, opened, progress, window_of_sessions, written
from worker.bandit.arrays import sigmoid
from worker.bandit.bonuses import explore_budget, joined, restarted
from worker.bandit.personal import PersonalModel
from worker.bandit.planning import slate_chances
from worker.errors import InputError
from worker.stream.events import ArmChange, ArmEntry, CatalogueChange, Command, Episode, JournalEvent, Opened
from worker.stream.learner import Learner
from worker.stream.parameters import Parameters, decode_parameters
from worker.stream.settings import Arm, LearningSettings
from worker.stream.slates import SlatePlanner
from worker.stream.version_records import encode_parameters

WINDOW = 6000
SETTINGS = LearningSettings(
    repeats=True, dim=2, horizon=3, window=WINDOW, session_timeout=300, lateness=50, warmup=1, standardise=False
)
ARMS = tuple(Arm(arm=name, reward=1.0) for name in "abcd")

#: Whether a user with this context clicks, passes, or gives no answer (None).
Answer = Callable[[str, np.ndarray], bool | None]


class Stream:
    """A learner, and the sessions of one window after the other, planned as serving plans them."""

    def __init__(self, arms: tuple[Arm, ...] = ARMS, **changes: Any) -> None:
        self.settings = replace(SETTINGS, **changes)
        self.arms = arms
        self.learner = Learner(self.settings, arms)
        self.journal: list[JournalEvent] = []
        self.episodes: list[Episode] = []
        self.versions: list[Parameters] = []
        self.windows = 0

    @property
    def current(self) -> Parameters:
        return self.learner.current

    def order(self, *orders: JournalEvent) -> None:
        offset = len(self.journal)
        self.journal += orders
        outcome = self.learner.handle(written(orders, offset))
        assert not outcome.refusals
        self.episodes += outcome.episodes
        self.versions += outcome.versions

    def window(self, contexts: np.ndarray, answer: Answer) -> list[tuple[str, ...]]:
        """Serve users with these contexts, close their window, and return their slates."""
        events = window_of_sessions(SlatePlanner(self.current), contexts, self.windows * WINDOW, answer)
        self.windows += 1
        self.order(*events, progress(self.windows * WINDOW + 350))
        return [event.slate for event in events if isinstance(event, Opened)]


def taste(generator: np.random.Generator) -> Answer:
    """Return users who like `a` if their first feature is above zero and `b` otherwise."""

    def answer(arm: str, context: np.ndarray) -> bool:
        liked = "a" if context[0] > 0 else "b"
        return bool(generator.random() < (0.7 if arm == liked else 0.05))

    return answer


def test_users_get_the_ad_that_users_like_them_prefer() -> None:
    generator = np.random.default_rng(1)
    stream = Stream()
    for _ in range(15):
        contexts = generator.normal(size=(100, 2))
        slates = stream.window(contexts, taste(generator))
    clear = np.abs(contexts[:, 0]) > 0.5
    liked = np.where(contexts[:, 0] > 0, "a", "b")
    first = np.array([slate[0] for slate in slates])
    assert (first[clear] == liked[clear]).mean() > 0.9


def test_a_new_ad_starts_at_the_base_rate_and_a_version_without_data_nowhere() -> None:
    generator = np.random.default_rng(3)
    stream = Stream()
    for _ in range(4):
        stream.window(generator.normal(size=(200, 2)), lambda *_: bool(generator.random() < 0.1))
    stream.order(ArmChange(arm="new", reward=1.0, active=True))
    rate = sigmoid(stream.current.model.biases)[-1]
    assert 0.05 < rate < 0.25, "near the clicks of the others, not at one half"


def test_a_new_ad_with_features_starts_where_ads_like_it_are() -> None:
    generator = np.random.default_rng(4)
    kinds = {name: ("shoes" if n % 2 else "food") for n, name in enumerate("abcdefgh")}
    arms = tuple(Arm(arm=name, reward=1.0, features={"kind": kind}) for name, kind in kinds.items())
    stream = Stream(arms)
    for _ in range(6):
        stream.window(
            generator.normal(size=(200, 2)),
            lambda arm, _: bool(generator.random() < (0.5 if kinds[arm] == "shoes" else 0.05)),
        )
    for name, kind in (("pump", "shoes"), ("bread", "food")):
        stream.order(ArmChange(arm=name, reward=1.0, active=True, features={"kind": kind}))
    shoes, food = sigmoid(stream.current.model.biases)[-2:]
    assert shoes > 2 * food


def test_corrected_features_of_an_ad_leave_what_was_learned_of_it() -> None:
    generator = np.random.default_rng(5)
    arms = tuple(Arm(arm=name, reward=1.0, features={"price": float(n)}) for n, name in enumerate("abcd"))
    stream = Stream(arms)
    stream.window(generator.normal(size=(200, 2)), taste(generator))
    before = stream.current.model.biases
    stream.order(ArmChange(arm="b", reward=1.0, active=True, features={"price": 3.0}))
    np.testing.assert_allclose(stream.current.model.biases, before, rtol=1e-9)
    stream.window(generator.normal(size=(50, 2)), taste(generator))
    assert stream.episodes[-1].rejected is None


# ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_answers_are_counted_up_to_the_first_display_that_has_none() -> None:
    learner = Learner(SETTINGS, ARMS)
    events: list[JournalEvent] = [
        opened("silent", 10, ("a", "b", "c")),
        opened("passes", 20, ("a", "b", "c")),
        feedback(1, "a", False, 21, "passes"),
        opened("clicks", 30, ("a", "b", "c")),
        feedback(2, "b", True, 31, "clicks"),
        opened("passes all", 40, ("c", "c", "d")),
        feedback(3, "d", False, 41, "passes all"),
        progress(WINDOW + 350),
    ]
    (version,) = learner.handle(written(events)).versions
    assert version.answers is not None
    # A click says nothing about who goes on.
    assert version.answers.displayed.tolist() == [[3, 0, 1, 0], [0, 1, 1, 0], [0, 0, 0, 1]]
    assert version.answers.answered.tolist() == [[2, 0, 1, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    assert version.rates is not None
    assert version.rates.arms[0] < version.rates.arms[2]


@pytest.mark.parametrize("changes", [{"answers": "all"}, {"unanswered": "passed"}], ids=str)
def test_rates_are_not_learned_where_they_are_switched_off_or_cannot_be_known(changes: dict[str, Any]) -> None:
    stream = Stream(**changes)
    stream.window(np.zeros((20, 2)), lambda *_: None)
    assert (stream.current.answers, stream.current.rates) == (None, None)


@pytest.mark.parametrize("policy", ["ucbbp", "aucbbp"])
def test_an_ad_that_gets_no_answer_fades_out_instead_of_taking_over(policy: str) -> None:
    generator = np.random.default_rng(6)

    def answer(arm: str, context: np.ndarray) -> bool | None:
        return None if arm == "d" else bool(generator.random() < 0.2)

    for answers in ("learned", "all"):
        stream = Stream(policy=policy, answers=answers)
        for _ in range(12):
            slates = stream.window(generator.normal(size=(100, 2)), answer)
        assert np.mean([slate[0] == "d" for slate in slates]) < 0.02, answers


# ── exploration ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("segments", [1, 4])
@pytest.mark.parametrize("repeats", [True, False])
def test_where_contexts_are_few_as_many_sessions_explore_as_the_budget_says(segments: int, repeats: bool) -> None:
    generator = np.random.default_rng(8)
    stream = Stream(policy="aucbbp", horizon_episodes=300, repeats=repeats)
    kinds = np.array([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]])[:segments]
    explored, budget = 0.0, 0.0
    for t in range(25):
        if t:
            budget += stream.current.explore_budget
        stream.window(kinds[generator.integers(segments, size=300)], lambda *_: bool(generator.random() < 0.1))
        if t:
            explored += stream.episodes[-1].explored
    assert abs(explored / budget - 1) < 0.1


class NewAds:
    """Users with tastes and ads of unequal prices, learned from until M_t is 1; then new ads come by an order."""

    def __init__(self, count: int, *, waiting: int) -> None:
        generator = self.generator = np.random.default_rng(count)
        self.known, total = 10, 10 + count
        names, self.rewards = [f"ad-{k}" for k in range(total)], generator.uniform(0.3, 1, total)
        self.index = {name: k for k, name in enumerate(names)}
        own = np.column_stack([generator.normal(-1.5, 0.7, total), generator.normal(0, 0.7, (total, 2))])
        self.truth = PersonalModel.certain(own)
        arms = [Arm(arm=name, reward=reward) for name, reward in zip(names, self.rewards.tolist(), strict=True)]
        self.stream = Stream(tuple(arms[:10]), horizon=5, horizon_episodes=10)
        for _ in range(20):
            self.stream.window(generator.normal(size=(200, 2)), self.answer)
        self.before = self.stream.current
        contexts, start = generator.normal(size=(waiting, 2)), self.stream.windows * WINDOW
        self.stream.order(*window_of_sessions(SlatePlanner(self.before), contexts, start, self.answer))
        new = tuple(ArmEntry(arm=arm.arm, reward=arm.reward, active=True) for arm in arms[10:])
        self.stream.order(CatalogueChange(changes=new))
        self.after = self.stream.current

    def answer(self, arm: str, context: np.ndarray) -> bool:
        odds = self.truth.log_odds(context[None])[0, self.index[arm]]
        return bool(self.generator.random() < sigmoid(odds))

    def served(self, version: Parameters) -> tuple[float, float]:
        """Return the share of new ads in the displays of 1,000 sessions, and their expected revenue."""
        contexts = np.random.default_rng(0).normal(size=(1000, 2))
        events = window_of_sessions(SlatePlanner(version), contexts, 0, lambda *_: None)
        slates = np.array([[self.index[arm] for arm in event.slate] for event in events if isinstance(event, Opened)])
        chances = slate_chances(self.truth, contexts, slates)
        reached = np.cumprod(np.hstack([np.ones((1000, 1)), 1 - chances[:, :-1]]), axis=1)
        return float(reached[slates >= self.known].sum() / reached.sum()), float(
            (reached * chances * self.rewards[slates]).sum()
        )


@pytest.mark.parametrize("waiting", [0, 150])
@pytest.mark.parametrize(("count", "most"), [(1, 0.1), (10, 0.3)])
def test_new_ads_keep_to_the_budget_until_the_next_version(count: int, most: float, waiting: int) -> None:
    world = NewAds(count, waiting=waiting)
    before, after = world.before, world.after
    assert (before.explore_budget, before.clock) == (1, 20.0)
    (_, revenue), (share, then) = world.served(before), world.served(after)
    assert share <= most
    assert then >= 0.98 * revenue
    # With the thresholds of the version before, nearly every session would explore, and show little else.
    careless, _ = world.served(replace(after, thresholds=before.thresholds, ties=before.ties))
    assert careless > 0.5
    # Nor does a version that lacks them hand the stream to them.
    world.stream.order(Command(action="rollback", version=before.version))
    assert world.served(world.stream.current)[0] <= most
    assert world.stream.current.clock == after.clock
    world.stream.order(Command(action="rollback", version=after.version))
    assert world.stream.current.thresholds == after.thresholds
    # Exploration resumes with the next fold, in proportion to the ads that are new.
    assert after.clock == joined(20.0, count / (10 + count), 10)
    world.stream.window(world.generator.normal(size=(200, 2)), world.answer)
    assert world.stream.current.explore_budget == explore_budget(200 + waiting, after.clock + 2, 10) > 3
    assert world.stream.episodes[-1].rejected is None


def test_where_tastes_change_the_fold_forgets_and_exploration_resumes_and_else_neither() -> None:
    generator = np.random.default_rng(10)
    stream = Stream(horizon_episodes=10)

    def liking(sign: float) -> Answer:
        effects = {"a": 1.5 * sign, "b": -1.5 * sign, "c": 0.0, "d": 0.0}
        return lambda arm, context: bool(generator.random() < sigmoid(effects[arm] * context[0] - 1.0))

    for window in range(16):
        stream.window(generator.normal(size=(150, 2)), liking(1.0 if window < 12 else -1.0))
    folded = [version for version in stream.versions if version.folds]
    assert [(version.kept, version.changed) for version in folded[:12]] == [(1.0, ())] * 12
    assert [version.clock for version in folded[:12]] == list(map(float, range(1, 13)))
    changed = folded[12]
    assert (changed.kept, changed.changed) == (1.0, ("a", "b"))
    assert changed.clock == restarted(13.0, 2 / 4, 10)
    assert changed.explore_budget > 10 * folded[11].explore_budget
    assert decode_parameters(encode_parameters(changed)) == changed
    steady = Stream(horizon_episodes=10, forgetting=1.0)
    for window in range(14):
        steady.window(generator.normal(size=(150, 2)), liking(1.0 if window < 12 else -1.0))
    assert (steady.current.kept, steady.current.clock) == (1.0, 14.0)


def test_tastes_that_the_model_cannot_express_are_not_taken_for_a_change_again_and_again() -> None:
    """A step: what would be forgotten is missed in the next windows, which would look like another change."""
    generator = np.random.default_rng(4)
    stream = Stream()
    for _ in range(40):
        stream.window(generator.normal(size=(150, 2)), taste(generator))
    assert sum(version.kept < 1 or bool(version.changed) for version in stream.versions) <= 5


# ── regret, settings ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_regret_stays_above_zero_when_ads_are_retired() -> None:
    generator = np.random.default_rng(9)
    stream = Stream()
    for _ in range(4):
        stream.window(generator.normal(size=(100, 2)), taste(generator))
    # Served before, assessed after: all but one are retired while their window is open.
    start = stream.windows * WINDOW
    events: list[JournalEvent] = [
        opened(f"last-{row}", start + row, ("a", "b", "a"), context=(1.0, 0.0)) for row in range(50)
    ]
    stream.order(*events, *(ArmChange(arm=name, reward=1.0, active=False) for name in "abc"))
    stream.order(progress(start + WINDOW + 350))
    episode = stream.episodes[-1]
    assert episode.sessions == 50
    assert episode.regret_bound is not None
    assert episode.regret_posterior is not None
    assert episode.regret_bound >= 0
    assert episode.regret_posterior >= 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"model": "additive"}, "--model is additive, but .* have personal"), ({"dim": 3}, "--dim is 3, but .* have 2")],
    ids=["model", "dim"],
)
def test_a_version_of_another_model_is_refused_with_one_line(changes: dict[str, Any], message: str) -> None:
    known = Learner(SETTINGS, ARMS).begin().versions
    with pytest.raises(InputError, match=message):
        Learner(replace(SETTINGS, **changes), ARMS, known)
