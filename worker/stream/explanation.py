"""The reasons for a slate: every number behind it, in float64, next to the choice that serving makes.

The slate is the one that serving plans for the session, drawn by lot or not. An arrival without the id of a session is
planned as if nothing was left to chance. The choice comes from the kernel that serves, in float32. The numbers are
computed again in float64, so of two arms whose scores agree in the first seven digits the choice may seem to be the
second best.

The contest of the arms for each position: arm k at position h is clicked with probability f = f_kh. Of the users who do
not click, the share s = min(1, ρ_k r_h) goes on, 1 where rates are not learned (docs/math.md §8). With repeats, all
eligible arms compete at every position:

    score = q + bonus        q = Q̂_h(k) = f e + (1 − f) s V_{h+1}

The bonus is 0 if the position exploits. Each session multiplies the bonus of each arm by a factor of its own, by its
id: the spread. `myopic-ucb` takes every position as the first and the last one, V_{h+1} = 0, and has no spread.

Without repeats (docs/math.md §7) arms are shown in an order, so only those after the last one shown compete. q is what
an arm earns together with the best slate after it under the estimate, score the same under the optimistic probabilities
of the bonus if the session explores. The bonus is the difference. A slate that ends too early is filled up with other
arms, which compete for the rest by the revenue of their own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

import numpy as np

from worker.bandit.answers import Cascade
from worker.bandit.arrays import Floats, Ints, sigmoid
from worker.bandit.bonuses import BONUSES, Spread
from worker.bandit.ordering import earned_in_order, order_of_showing
from worker.bandit.planning import optimal_values, slate_values
from worker.bandit.policies import POLICIES, Fixed, Greedy, MyopicUcb, Random
from worker.errors import InputError
from worker.stream.chance import stable_keys
from worker.stream.contexts import pack_context
from worker.stream.events import Arrival
from worker.stream.parameters import Parameters
from worker.stream.slates import Slate, SlatePlanner
from worker.stream.tagged import by_tag
from worker.stream.tastes import Contribution, context_columns, contributions, position_effect, strongest_first

SCORES: Final = "scores"
GREEDY: Final = "greedy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """A slate with its reasons; `notes` name what serving leaves to chance."""

    slate: tuple[str, ...]
    positions: tuple[Position, ...]
    notes: tuple[str, ...]

    @property
    def modes(self) -> tuple[str, ...]:
        """The mode of each position."""
        return tuple(position.mode for position in self.positions)


def explain(
    parameters: Parameters, arrival: Arrival, *, names: tuple[str, ...] | None = None, served: Slate | None = None
) -> Explanation:
    """Explain the slate of an arrival, whose context is as it came.

    `names` are those of the numbers of the context, if they are not those of the version. `served` is the slate of the
    session if that is known.
    """
    notes = _notes(parameters, arrival)
    parameters = for_arrival(parameters, arrival)
    given = np.array(arrival.context)
    slate = served or SlatePlanner(parameters).plan([arrival], [pack_context(arrival.context)])[0]
    chooser, way = chosen_by(parameters, slate.modes[0] if slate.modes else "none", arrival)
    tagged = parameters.settings.tagged if chooser is not parameters else None
    if tagged is not None:
        notes += (f"the control group gets what version {tagged.version}, tagged {tagged.name}, chooses of its ads",)
    parameters = chooser
    eligible = [index for index, arm in enumerate(parameters.arms) if arm.active and arm.arm not in arrival.exclude]
    arms = np.array(eligible, dtype=np.intp)
    if not slate.arms:
        out = out_of(parameters, arms, [], ())
        nothing = Position(position=1, continuation=0.0, choice=None, mode="none", arms=(), out=out)
        return Explanation(slate=(), positions=(nothing,), notes=("no arm is eligible: the slate is empty",))
    if way == GREEDY:
        parameters = replace(parameters, settings=replace(parameters.settings, policy=Greedy.name))
    with np.errstate(all="ignore"):
        context = parameters.prepared(given[None, :])[0]
        try:
            contest = Contest(parameters, context, arms, arrival.session_id)
        except InputError as error:
            if way != "fallback" or served is None:
                raise
            return Explanation(slate=served.arms, positions=(), notes=(f"fallback: {error}",))
        columns = names or context_columns(parameters)
        reasons = {index: contributions(parameters, index, given, context, columns) for index in eligible}
        positions = contest.positions([parameters.indices[arm] for arm in slate.arms], slate.modes, reasons, way)
    if tagged is not None:
        positions = [replace(one, arms=tuple(replace(arm, width=None) for arm in one.arms)) for one in positions]
    return Explanation(slate=slate.arms, positions=tuple(positions), notes=notes)


def for_arrival(parameters: Parameters, arrival: Arrival) -> Parameters:
    """Return the version that serves an arrival; for one without a session, it leaves nothing to chance."""
    if arrival.session_id:
        return parameters
    drawn = POLICIES[parameters.settings.policy].draws
    settings = replace(
        parameters.settings,
        policy=Greedy.name if drawn else parameters.settings.policy,
        warmup=0,
        spread=0.0,
        random_share=0.0,
        control_share=0.0,
    )
    return replace(parameters, settings=settings, ties=())


def chosen_by(parameters: Parameters, mode: str, arrival: Arrival) -> tuple[Parameters, str]:
    """Return the version that chooses a slate of this mode, and how: that of the tagged version, for a control group.

    If that one has no eligible arm, the slate is a fallback.
    """
    if mode != "control" or parameters.settings.tagged is None:
        return parameters, way_of(parameters, mode)
    tagged = by_tag(parameters)
    if any(arm.active and arm.arm not in arrival.exclude for arm in tagged.arms):
        return tagged, GREEDY
    return parameters, "fallback"


def way_of(parameters: Parameters, mode: str) -> str:
    """Return how a slate of this mode is chosen: by scores, greedily by them, by a lot, in an order, or as fallback.

    Under epsilon-greedy a lot decides at each position whether another arm takes the place of the best one.
    """
    policy = POLICIES[parameters.settings.policy]
    how = parameters.settings.control if mode == "control" else mode
    if how in ("explore", "exploit"):
        return "order" if policy is Fixed else "epsilon" if policy.draws else SCORES
    return _WAYS.get(how, SCORES)


_WAYS: Final = {
    **dict.fromkeys(("warmup", "random"), "lot"),
    **dict.fromkeys(("fixed", "popular"), "order"),
    **dict.fromkeys(("greedy", "guarded"), GREEDY),
    "fallback": "fallback",
}


def _notes(parameters: Parameters, arrival: Arrival) -> tuple[str, ...]:
    settings = parameters.settings
    policy = POLICIES[settings.policy]
    notes = []
    if policy is Fixed:
        notes.append("fixed order: the first eligible ads of it, whatever they are expected to earn")
    if policy.is_selective and not parameters.thresholds:
        notes.append("no exploration thresholds for this horizon: every position explores")
    if arrival.session_id:
        return tuple(notes)
    if parameters.is_warming_up:
        notes.append(
            f"warm-up, {parameters.folds} of {settings.warmup} folds: serving draws any eligible arm at random; "
            f"this is the slate of {Greedy.name if policy.draws else settings.policy}"
        )
    elif policy is Random:
        notes.append("random policy: serving draws any eligible arm; this is the slate of greedy")
    elif policy.draws:
        notes.append(f"epsilon-greedy: with probability {settings.epsilon:g} a position shows any eligible arm instead")
    if settings.random_share > 0:
        notes.append(f"{settings.random_share:.1%} of sessions have a random slate instead (random_share)")
    if has_spread(parameters):
        notes.append(
            f"no session id: without the spread of {settings.spread:g}, by which sessions differ in their bonuses"
        )
    if policy.is_selective and parameters.policy().needs_chance:
        notes.append(
            "ties: of the sessions with exactly the score of a threshold, serving lets a share explore, by their ids; "
            "here all of them explore"
        )
    return tuple(notes)


# ── the contest ──────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """An arm that competed for a position.

    probability : of a click at this position
    width : of the log-odds; None under a tagged version, which has none
    answer_rate : share of the users without a click who go on; None where rates are not learned
    spread : factor of the session on the bonus; None if sessions do not differ
    contributions : the parts of its log-odds, the largest first
    """

    arm: str
    probability: float
    q: float
    width: float | None
    bonus: float
    score: float
    answer_rate: float | None = None
    spread: float | None = None
    contributions: tuple[Contribution, ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """A position of the slate: the competing arms, the choice, and the revenue of a user who goes on (continuation).

    way : how it was chosen: by the highest score, or by something else (`way_of`)
    out : why each of the other arms could not be shown here
    """

    position: int
    continuation: float
    choice: str | None
    mode: str
    arms: tuple[Candidate, ...]
    way: str = SCORES
    out: Mapping[str, str] = field(default_factory=dict)


class _Round(NamedTuple):
    """The contest for a position: columns that compete, with q and score.

    `after` is the revenue after the position; `place` is the position, from 0, whose probabilities and rates count.
    """

    columns: Ints
    q: Floats
    score: Floats
    after: float
    place: int


class Contest:
    """The eligible arms of one session, one column each.

    `chances` (H, columns) are the click probabilities at each position, `rates` those of the users without a click who
    go on, `factors` those of the spread, if there is one.
    """

    def __init__(self, parameters: Parameters, context: Floats, eligible: Ints, session: str) -> None:
        self.parameters, self.arms, self.context = parameters, eligible, context
        self.horizon, self.bonus = parameters.settings.horizon, BONUSES[parameters.settings.bonus]
        self.rewards, model = parameters.rewards[eligible], parameters.model
        contexts, arms = context[None, :], eligible[None, :]
        self.log_odds = model.log_odds_of(contexts, arms)[0]
        self.widths = np.sqrt(model.squared_widths_of(contexts, arms)[0])
        if not (np.isfinite(self.log_odds).all() and np.isfinite(self.widths).all()):
            raise InputError("the context is too large: the numbers overflow")
        self.first = sigmoid(self.log_odds)
        self.cascade = Cascade.of(model.position_effects, parameters.rates, shown=eligible, horizon=self.horizon)
        self.chances = np.stack([self.cascade.chances(self.first, h) for h in range(self.horizon)])
        self.rates = np.ones(self.chances.shape) if self.cascade.rates is None else self.cascade.rates
        self.factors = self._factors(session) if has_spread(parameters) else None

    def _factors(self, session: str) -> Floats:
        settings, names = self.parameters.settings, [self.parameters.arms[arm].arm for arm in self.arms]
        spread, keys = Spread(share=settings.spread, keys=stable_keys([session], settings.salt)), stable_keys(names)
        # Without repeats, one order for all positions.
        turns = range(self.horizon) if settings.repeats else [0] * self.horizon
        return np.concatenate([spread.factors(slice(0, 1), keys, np.float64, turn) for turn in turns])

    def positions(
        self, slate: list[int], modes: Sequence[str], reasons: Mapping[int, tuple[Contribution, ...]], way: str
    ) -> list[Position]:
        """Explain every position of the slate, which was chosen in this way; `reasons` are parts of log-odds."""
        settings, explored = self.parameters.settings, [mode == "explore" for mode in modes]
        if way not in (SCORES, GREEDY):
            rounds = self._unscored(slate, 0, again=settings.repeats and way != "order")
        elif POLICIES[settings.policy] is MyopicUcb:
            rounds = self._myopic(slate)
        elif settings.repeats:
            rounds = self._with_repeats(explored)
        else:
            rounds = self._without_repeats(slate, explored)
        return [
            self._position(slate, h, mode, way, reasons, round_)
            for h, (mode, round_) in enumerate(zip(modes, rounds, strict=True))
        ]

    # ── the contest for each position ────────────────────────────────────────────────────────────────────────────────

    def _with_repeats(self, explored: list[bool]) -> Iterator[_Round]:
        values = optimal_values(self.first[None, :], self.rewards, self.horizon, self.cascade)[0]
        for h, (explore, after) in enumerate(zip(explored, [*values[1:].tolist(), 0.0], strict=False)):
            yield self._round(np.arange(len(self.arms)), after, h, explore=explore)

    def _myopic(self, slate: list[int]) -> Iterator[_Round]:
        for h in range(len(slate)):
            columns = self._left([] if self.parameters.settings.repeats else slate[:h])
            yield self._round(columns, 0.0, 0, explore=True)

    def _unscored(self, slate: list[int], start: int, *, again: bool = False) -> Iterator[_Round]:
        """Explain the positions from `start` on, which show arms that no score has chosen, perhaps `again`."""
        parameters, chosen = self.parameters, np.array([slate], dtype=np.intp)
        values = slate_values(parameters.model, parameters.rewards, self.context[None, :], chosen, parameters.rates)
        after = [*values[0].tolist(), 0.0]
        for h in range(start, len(slate)):
            yield self._round(self._left([] if again else slate[:h]), after[h + 1], h, explore=False)

    def _left(self, shown: list[int]) -> Ints:
        return np.flatnonzero(~np.isin(self.arms, shown))

    def _round(self, columns: Ints, after: float, h: int, *, explore: bool) -> _Round:
        chances, ahead = self.chances[h, columns], self.rates[h, columns] * after
        gains = self.rewards[columns] - ahead
        q = score = chances * gains + ahead
        if explore:
            factors = None if self.factors is None else self.factors[h, columns]
            raised = self.bonus.raised(chances, self.parameters.settings.beta * self.widths[columns], factors)
            score = self.bonus.scores(gains, chances, raised, leaving=True) + ahead
        return _Round(columns, q, score, after, h)

    def _without_repeats(self, slate: list[int], explored: list[bool]) -> Iterator[_Round]:
        optimistic = self.first
        if any(explored):
            factors = None if self.factors is None else self.factors[0]
            optimistic = self.bonus.optimistic(self.log_odds, self.parameters.settings.beta * self.widths, factors)
        # Arms of the same worth may stand in any order: in that of the slate, as serving shows what is alike by turns.
        places = {arm: place for place, arm in enumerate(slate)}
        first = np.argsort([places.get(arm, len(slate)) for arm in self.arms.tolist()], kind="stable")
        order = first[order_of_showing(optimistic[first], self.rewards[first], self.cascade.choose(first))]
        earned, hoped = (
            earned_in_order(chances, self.rewards, self.horizon, self.cascade, order)
            for chances in (self.first, optimistic)
        )
        begin = 0
        for h, (arm, explore) in enumerate(zip(slate, explored, strict=True)):
            place = int(np.flatnonzero(self.arms[order] == arm)[0])
            if place < begin:
                yield from self._unscored(slate, h)
                return
            left = self.horizon - h - 1
            after = float(earned[left - 1, place + 1 :].max(initial=0.0)) if left else 0.0
            score = (hoped if explore else earned)[left, begin:]
            yield _Round(order[begin:], earned[left, begin:], score, after, h)
            begin = place + 1

    # ── the result ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _position(
        self,
        slate: list[int],
        h: int,
        mode: str,
        way: str,
        reasons: Mapping[int, tuple[Contribution, ...]],
        round_: _Round,
    ) -> Position:
        catalogue, factors, place = self.parameters.arms, self.factors, round_.place
        learned = self.parameters.answers is not None
        effect = position_effect(self.parameters, place)
        numbers = zip(round_.columns.tolist(), round_.q.tolist(), round_.score.tolist(), strict=True)
        return Position(
            position=h + 1,
            continuation=round_.after,
            choice=catalogue[slate[h]].arm,
            mode=mode,
            way=way,
            out=out_of(self.parameters, self.arms, slate[:h], frozenset(self.arms[round_.columns].tolist())),
            arms=tuple(
                Candidate(
                    arm=catalogue[self.arms[column]].arm,
                    probability=float(self.chances[place, column]),
                    q=q,
                    width=float(self.widths[column]),
                    bonus=score - q,
                    score=score,
                    answer_rate=float(self.rates[place, column]) if learned else None,
                    spread=None if factors is None else float(factors[place, column]),
                    contributions=strongest_first(reasons[int(self.arms[column])] + effect),
                )
                for column, q, score in sorted(numbers)  # in the order of the catalogue
            ),
        )


def out_of(parameters: Parameters, eligible: Ints, shown: list[int], competing: Collection[int]) -> dict[str, str]:
    """Return why arms do not compete for the position after those shown."""

    def why(index: int) -> str:
        if not parameters.arms[index].active:
            return "retired"
        if index not in eligible:
            return "excluded by the arrival"
        return f"shown at position {shown.index(index) + 1}" if index in shown else "its turn in the order is over"

    return {arm.arm: why(index) for index, arm in enumerate(parameters.arms) if index not in competing}


def has_spread(parameters: Parameters) -> bool:
    """Return whether sessions differ in their bonuses under a version."""
    return parameters.settings.spread > 0 and hasattr(parameters.policy(), "spread")
