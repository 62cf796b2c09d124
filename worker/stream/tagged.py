"""A tagged version, as far as a control group needs it: `--control tag:NAME`.

Rules that hold in this file:

- Every version carries the estimate that the tagged one had: coefficients, effects of positions, who goes on, and the
  scale of contexts. It never learns. It has no precision, because nothing explores by it: so it adds 0.5 MB to a
  version of 1,000 ads and 32 features, which is 9 % under the model personal, where the whole one would double it.
- Prices, and which ads can be shown, are those of the version that serves. Ads that the tagged one lacks are not shown.
- It has the columns of the version that carries it. Where features change, it follows by name; a feature that is gone
  counts as missing (`feature_changes.py:in_columns`). `sha256` stays that of the version that was tagged.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated

import numpy as np
from msgspec import Struct, convert, structs, to_builtins

from worker.bandit.answers import AnswerCounts
from worker.bandit.arrays import Floats, Ints, chosen
from worker.bandit.personal import PersonalModel
from worker.bandit.policies import Greedy
from worker.stream.calibration import Calibration
from worker.stream.contexts import SCALES, Standardisation
from worker.stream.crosses import Pair
from worker.stream.events import Count, Identifier, TagName, described
from worker.stream.features import Feature, Features
from worker.stream.packing import PackedArray, packed, unpacked
from worker.stream.settings import Arm

if TYPE_CHECKING:  # a version carries a tagged one: it imports this file
    from worker.stream.parameters import Parameters


class TaggedVersion(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The estimate of a tagged version, by which the control group is served."""

    name: Annotated[TagName, described("Its tag when it was looked up.")]
    version: Annotated[Count, described("Its number.")]
    sha256: Annotated[str, described("Its hash.", pattern="^[0-9a-f]{64}$")]
    arms: Annotated[tuple[Identifier, ...], described("Arms that it knows.")]
    context: Annotated[tuple[Feature, ...], described("Declared features of its columns.")] = ()
    crosses: Annotated[tuple[Pair, ...], described("Crosses of them.")] = ()
    coefficients: Annotated[PackedArray, described("Coefficients of [1; x] in the log-odds of each arm, (K, d+1).")]
    positions: Annotated[PackedArray, described("Effect of each position after the first, shape (H−1).")]
    answers: Annotated[
        tuple[PackedArray, ...], described("Displays without a click, and those answered by a pass, (H, K) each.")
    ] = ()
    scale: Annotated[
        tuple[PackedArray, ...], described("Centre, scale, exponent and unit of contexts, shape (d) each.")
    ] = ()

    @classmethod
    def of(cls, name: str, parameters: Parameters) -> TaggedVersion:
        """Return what a control group needs of a version."""
        model, counts, known = parameters.model, parameters.answers, parameters.standardisation
        features = parameters.settings.features
        heads = [model.head(arm)[0] for arm in range(model.arms)]
        return cls(
            name=name,
            version=parameters.version,
            sha256=parameters.sha256,
            arms=tuple(arm.arm for arm in parameters.arms),
            context=() if features is None else features.context,
            crosses=() if features is None else features.crosses,
            coefficients=_packed(np.reshape(heads, (model.arms, model.dim + 1))),
            positions=_packed(model.position_effects[1:]),
            answers=() if counts is None else (_packed(counts.displayed), _packed(counts.answered)),
            scale=_scale_of(known),
        )

    def choose_columns(self, features: Features, context: Ints, model: Ints) -> TaggedVersion:
        """Return it in the columns of other features, which continue these of contexts and in the model, −1 if none."""
        estimate, _, known = _estimate(self)
        columns = np.concatenate([[0], np.where(model < 0, -1, model + 1)])
        return structs.replace(
            self,
            context=features.context,
            crosses=features.crosses,
            coefficients=_packed(chosen(estimate.own, columns, 1)),
            scale=_scale_of(None if known is None else known.choose_columns(context, features.number_columns)),
        )


def by_tag(parameters: Parameters) -> Parameters:
    """Return the version that serves the control group of another one, greedily: the estimate of the tagged version."""
    tagged, settings = parameters.settings.tagged, parameters.settings
    assert tagged is not None
    model, counts, scale = _estimate(tagged)
    now = {arm.arm: arm for arm in parameters.arms}
    return replace(
        parameters,
        settings=replace(settings, model=model.name, intercept=True, policy=Greedy.name, control=Greedy.name),
        arms=tuple(now.get(arm, Arm(arm=arm, reward=1.0, active=False)) for arm in tagged.arms),
        model=model,
        answers=None if counts is None else counts.with_horizon(settings.horizon),
        standardisation=scale,
        pending=None,
        popular=(),
        calibration=Calibration(),
        misfit=None,
    )


@lru_cache(maxsize=4)  # one for all versions that carry it
def _estimate(tagged: TaggedVersion) -> tuple[PersonalModel, AnswerCounts | None, Standardisation | None]:
    """Return the estimate as a model, with the precision of the prior, which nothing asks for."""
    heads, positions = _unpacked(tagged.coefficients), _unpacked(tagged.positions)
    arms, size = heads.shape
    prior = PersonalModel.prior(dim=size - 1, arms=arms, ridge=1.0, horizon=1 + len(positions))
    counts = scale = None
    if tagged.answers:
        displayed, answered = map(_unpacked, tagged.answers)
        counts = AnswerCounts(displayed=displayed, answered=answered)
    if tagged.scale:
        scale = Standardisation(**dict(zip(SCALES, map(_unpacked, tagged.scale), strict=True)))
    return replace(prior, own=heads, positions=positions), counts, scale


def _scale_of(known: Standardisation | None) -> tuple[PackedArray, ...]:
    return () if known is None else tuple(_packed(getattr(known, name)) for name in SCALES)


def _packed(array: Floats) -> PackedArray:
    return convert(packed("", array), PackedArray)


def _unpacked(array: PackedArray) -> Floats:
    return unpacked(to_builtins(array))
