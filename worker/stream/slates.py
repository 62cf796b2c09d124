"""From arrivals to slates of arm ids, under one version of the parameters.

The control group (docs/math.md §14): a session is in it if the number of its unit, the user or else the session, is
below `control_share`, whatever else may hold: also in the warm-up, under the guardrail, and if it would have been drawn
at random. So each session is in the group with exactly this probability. It gets, with no regard to what is learned
from the others,

- `fixed`: the order of the settings, then that of the catalogue; `popular`: that of the version, by revenue;
- `random`: any eligible arms; `greedy`: the best slate under the estimate of the same version;
- `tag:NAME`: the best slate under the estimate that a version with a tag had (`tagged.py`).

Under the guardrail nothing explores and nothing is drawn: all others get the best slate under the estimate.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property, lru_cache
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from worker.bandit.arrays import NO_ARM, Floats, Ints
from worker.bandit.ordering import fixed_slates
from worker.bandit.planning import Masked, Planner
from worker.bandit.policies import POLICIES, Greedy, Policy, Random, Slates, random_slates
from worker.errors import AdcascadeError, InputError
from worker.stream.chance import lottery, session_uniforms, stable_keys
from worker.stream.contexts import stack_packed
from worker.stream.events import Arrival, Mode
from worker.stream.parameters import Parameters
from worker.stream.tagged import by_tag


class Slate(NamedTuple):
    """The plan of one session, per position; `propensities` is None where nothing was left to chance."""

    arms: tuple[str, ...]
    modes: tuple[Mode, ...]
    propensities: tuple[float, ...] | None
    values: tuple[float, ...]


_NOTHING = Slate((), (), None, ())


class SlatePlanner:
    """Plans arrivals under one version. What it prepares for that, it prepares once."""

    def __init__(self, parameters: Parameters) -> None:
        self.parameters = parameters
        self.names = [arm.arm for arm in parameters.arms]
        self.index = parameters.indices

    @cached_property
    def _planner(self) -> Planner:
        planner = self.parameters.planner()
        if planner is None:
            raise InputError("no arm is active")
        return planner

    @cached_property
    def slate_bytes(self) -> int:
        """The most bytes that a slate adds to a record: for each position an id, a mode, a token and two numbers."""
        longest = max(map(len, map(str.encode, self.names)), default=0)
        return (self.parameters.settings.horizon + 1) * (2 * longest + 120)

    @cached_property
    def _policy(self) -> Policy:
        return self.parameters.policy()

    def prepare(self) -> None:
        """Do now, in any thread, what the first plan would do."""
        if any(arm.active for arm in self.parameters.arms):
            nobody = Arrival(session_id="", occurred_at=0, context=())
            context = np.zeros((1, self.parameters.settings.dim))
            self._planned(None, [nobody], context)
            if self.parameters.settings.tagged is not None:
                self._planned("control", [nobody], context)

    def plan(
        self, arrivals: Sequence[Arrival], contexts: Sequence[bytes], *, control_share: float | None = None
    ) -> list[Slate]:
        """Plan a batch; `contexts` are the packed contexts of the arrivals. A slate depends on its arrival alone.

        `control_share` takes the place of that of the version: 0 for nobody, 1 for all.
        """
        if not any(arm.active for arm in self.parameters.arms):
            return [_NOTHING] * len(arrivals)
        share = self.parameters.settings.control_share if control_share is None else control_share
        parts, raw = self._by_mode(arrivals, share), stack_packed(contexts, self.parameters.settings.dim)
        if len(parts) == 1:
            return self._planned(parts[0][0], arrivals, raw)
        slates = [_NOTHING] * len(arrivals)
        for mode, rows in parts:
            part = [arrivals[row] for row in rows]
            for row, slate in zip(rows, self._planned(mode, part, raw[rows]), strict=True):
                slates[row] = slate
        return slates

    def policy_slates(self, arrivals: Sequence[Arrival], raw: Floats, contexts: Floats) -> Ints:
        """Return the slates, as indices, that sessions have outside of the control group; contexts raw and prepared."""
        slates = np.empty((len(arrivals), self.parameters.settings.horizon), dtype=np.intp)
        for mode, rows in self._by_mode(arrivals, 0.0):
            part = [arrivals[row] for row in rows]
            names, excluded = [one.session_id for one in part], [one.exclude for one in part]
            slates[rows] = self.slates(mode, names, raw[rows], contexts[rows], excluded).arms
        return slates

    def _by_mode(self, arrivals: Sequence[Arrival], control_share: float) -> list[tuple[Mode | None, list[int]]]:
        """Split rows into sessions with one mode as a whole, and sessions that the policy plans (None)."""
        settings, guarded = self.parameters.settings, self.parameters.guarded
        random_share = self.parameters.random_share
        if self.parameters.is_warming_up or guarded:
            rest: Mode | None = "guarded" if guarded else "warmup"
        else:
            rest = "random" if POLICIES[settings.policy] is Random else None
        if not (control_share or random_share):
            return [(rest, list(range(len(arrivals))))]
        control = drawn = np.zeros(len(arrivals), dtype=np.bool_)
        if control_share:
            units = [arrival.user_id or arrival.session_id for arrival in arrivals]
            control = lottery("control", settings.salt, units) < control_share
        if random_share:
            units = [arrival.session_id for arrival in arrivals]
            drawn = (lottery("share", settings.salt, units) < random_share) & ~control
        parts: list[tuple[Mode | None, NDArray[np.bool_]]]
        parts = [(rest, ~(control | drawn)), ("control", control), ("random", drawn)]
        return [(mode, np.flatnonzero(chosen).tolist()) for mode, chosen in parts if chosen.any()]

    def _planned(self, mode: Mode | None, arrivals: Sequence[Arrival], raw: Floats) -> list[Slate]:
        otherwise: Mode = "control" if mode == "control" else "fallback"
        try:
            excluded = [arrival.exclude for arrival in arrivals]
            names = [arrival.session_id for arrival in arrivals]
            with np.errstate(all="ignore"):
                contexts = self.parameters.prepared(raw)
                slates = self.slates(mode, names, raw, contexts, excluded)
                values = self._planner.slate_values(contexts, slates.arms)
        except (AdcascadeError, ArithmeticError, ValueError, IndexError):
            # There is always an answer: under an unusable version, the ads with the highest rewards.
            return [self.fallback(arrival, otherwise) for arrival in arrivals]
        planned = self._named(mode, slates, values)
        # A row without an arm has no eligible arm, or scores that are not numbers.
        sound, first = np.isfinite(values), slates.arms[:, 0] != NO_ARM
        if sound.all() and first.all():
            return planned
        doubtful = ~(sound.all(axis=1) & first)
        for row in np.flatnonzero(doubtful).tolist():
            planned[row] = self.fallback(arrivals[row], otherwise)
        return planned

    def slates(
        self, mode: Mode | None, names: Sequence[str], raw: Floats, contexts: Floats, excluded: Sequence[Sequence[str]]
    ) -> Slates:
        """Return the slates of sessions of one mode, by their ids, contexts raw and prepared, and excluded arms."""
        settings, planner = self.parameters.settings, self._planner
        if mode == "control" and settings.tagged is not None:
            tagged, indices = self._tagged
            arms = tagged.slates("guarded", names, raw, tagged.parameters.prepared(raw), excluded).arms
            return Slates.certain(indices[arms], False)
        how, masked = settings.control if mode == "control" else mode, self._masked(excluded)
        if how in ("fixed", "popular"):
            return Slates.certain(fixed_slates(planner, len(names), self._control_order, masked), False)
        if how in ("greedy", "guarded"):
            return Greedy().slates(planner, contexts, masked)
        needed = how is not None or self._policy.needs_chance
        uniforms = session_uniforms(settings.salt, list(names), settings.horizon) if needed else None
        if how is not None and uniforms is not None:
            return random_slates(planner, len(names), uniforms[:, :, 1], masked)
        keys = stable_keys(names, settings.salt) if settings.spread else None
        return self._policy.slates(planner, contexts, masked, uniforms, keys)

    @cached_property
    def _tagged(self) -> tuple[SlatePlanner, Ints]:
        """The planner of the tagged version that the control group gets, and the index here of each of its arms."""
        planner = SlatePlanner(by_tag(self.parameters))
        return planner, np.array([*(self.index.get(arm, NO_ARM) for arm in planner.names), NO_ARM])

    @cached_property
    def _control_order(self) -> tuple[int, ...]:
        settings = self.parameters.settings
        if settings.control == "popular":
            return self.parameters.popular
        return tuple(self.index[arm] for arm in settings.order if arm in self.index)

    def _masked(self, excluded: Sequence[Sequence[str]]) -> Masked | None:
        """Return what each session must not show, by ids; None if nothing."""
        if not any(excluded):
            return None
        index = self.index
        return self._planner.masked([[index[arm] for arm in arms if arm in index] for arms in excluded])

    def _named(self, mode: Mode | None, slates: Slates, values: Floats) -> list[Slate]:
        """Turn indices into ids."""
        bits = slates.explored.dot(1 << np.arange(slates.arms.shape[1])).tolist() if mode is None else [0] * len(values)
        names = self.names.__getitem__
        certain = bool((slates.propensities == 1).all())
        return [
            Slate(
                tuple(map(names, arms[:length])),
                _modes(mode, explored, length),
                None if certain else tuple(propensities[:length]),
                tuple(worth[:length]),
            )
            for arms, explored, worth, propensities, length in zip(
                slates.arms.tolist(),
                bits,
                values.tolist(),
                slates.propensities.tolist(),
                (slates.arms != NO_ARM).sum(axis=1).tolist(),
                strict=True,
            )
        ]

    @cached_property
    def _highest_paying_first(self) -> list[str]:
        active = (arm for arm in self.parameters.arms if arm.active)
        return [arm.arm for arm in sorted(active, key=lambda arm: -arm.reward)]

    def fallback(self, arrival: Arrival, mode: Mode = "fallback") -> Slate:
        """Return the eligible ads with the highest rewards: a slate without planning."""
        settings, excluded = self.parameters.settings, set(arrival.exclude)
        eligible = (arm for arm in self._highest_paying_first if arm not in excluded)
        arms = list(islice(eligible, settings.horizon))
        if settings.repeats:
            arms = arms[:1] * settings.horizon
        return Slate(tuple(arms), (mode,) * len(arms), None, (0.0,) * len(arms))


def prepared(parameters: Parameters) -> SlatePlanner:
    """Return the planner of a version with all that serving and the status page need of it; this can take a second.

    Call it in a thread: large versions are factorised without the interpreter lock.
    """
    parameters.sha256  # noqa: B018 - computed once, here
    planner = SlatePlanner(parameters)
    planner.prepare()
    if parameters.arms:
        with np.errstate(all="ignore"), suppress(AdcascadeError, ArithmeticError, ValueError):
            nobody = np.zeros((1, parameters.settings.dim))
            parameters.model.squared_widths_of(nobody, np.zeros((1, 1), dtype=np.intp))
    return planner


@lru_cache(maxsize=4096)
def _modes(mode: Mode | None, explored: int, length: int) -> tuple[Mode, ...]:
    """Return the modes of a slate: one for all, or by the bits of the positions that explored."""
    if mode is not None:
        return (mode,) * length
    return tuple("explore" if explored >> position & 1 else "exploit" for position in range(length))
