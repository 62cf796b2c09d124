"""What the model misses, by name: pairs of declared features that matter together, and tastes under a model without.

`worker.bandit.misfit` has the test; here are the pairs, the sums that a version carries, and what is said of them.

Rules that hold in this file:

- Tested are all two declared features that are not declared as a cross, by the products of their columns; of a plain
  vector every two numbers. A model without tastes is tested for the taste of every feature as well.
- Of ads × products at most `MOST_SUMS` are tested, the pairs of the first features first. A pair of more products than
  a cross may have columns is left out. How many pairs are not tested is said.
- Sums begin with the second fold: the prior knows nothing of what is linear, either. A window whose fold forgets is
  left out: what has changed is no misfit. They are covered by the hash of the version. Orders leave them alone, but a
  change of the features begins them anew.
- A pair is missed if the evidence is `ALARM` standard deviations, so far that looking at every window finds nothing in
  worlds where the model is right, and if it matters at least weakly (`tastes.py`). Less than half as clear as the
  clearest is not said: what one missed pair does to the estimate looks like others.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import islice, product, repeat
from typing import TYPE_CHECKING, Final

import numpy as np

from worker.bandit.additive import AdditiveModel
from worker.bandit.arrays import ArrayValue, Floats, frozen_array, spread
from worker.bandit.click_model import Observations
from worker.bandit.misfit import NOTHING, Products, evidence_of, score_sums
from worker.errors import InputError
from worker.stream.crosses import MOST_PAIRS, spans_of
from worker.stream.events import MissedPair
from worker.stream.settings import LearningSettings

if TYPE_CHECKING:  # a version has these sums
    from worker.stream.parameters import Parameters

#: Ads × products that are tested: two numbers each in every version.
MOST_SUMS: Final = 16_384
#: Displays × products of a window that are looked at; of more displays an evenly spread sample.
MOST_ELEMENTS: Final = 4_000_000
#: Evidence in standard deviations, and strength, from which a pair is missed.
ALARM: Final = 5.0
LEAST_STRENGTH: Final = 0.1
#: Missed pairs that are named.
MOST_MISSED: Final = 5
AD: Final = "ad"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """Pairs to be tested.

    names : of each pair; a taste has `AD` in place of the first
    firsts : (pairs + 1,), where the products of each pair begin, and the number of all products
    left_out : number of pairs that are not tested
    """

    names: tuple[tuple[str, str], ...]
    firsts: tuple[int, ...]
    products: Products
    left_out: int


@lru_cache(maxsize=64)
def pairs_under(settings: LearningSettings, arms: int) -> Pairs:
    """Return what is tested for this number of arms; of a model without tastes, also the taste of every feature.

    >>> from worker.stream.features import Features
    >>> declared = Features.of_table({"context": {"age": "number", "hour": "number", "device": ["mobile", "desktop"]}})
    >>> pairs_under(LearningSettings(dim=4, features=declared), 2).names
    (('age', 'hour'), ('age', 'device'), ('hour', 'device'))
    """
    features, tastes = settings.features, settings.model == AdditiveModel.name
    columns = {f"x[{column + 1}]": range(column, column + 1) for column in range(settings.dim)}
    if features is not None and features.context:
        columns = spans_of(features.context)
    declared = {frozenset(cross) for cross in features.crosses} if features is not None else set()
    names, firsts, products = list[tuple[str, str]](), [0], list[tuple[int, int]]()
    for pair, width, of_pair in _wanted(columns, declared, tastes=tastes):
        if width > MOST_PAIRS:
            continue
        if (firsts[-1] + width) * max(1, arms) > MOST_SUMS:
            break  # so that more ads test a part of the same products
        names.append(pair)
        products += of_pair
        firsts.append(len(products))
    left, right = np.array(products, dtype=np.intp).reshape(-1, 2).T
    pairs = len(columns) * (len(columns) - 1) // 2 - sum(len(cross) == 2 for cross in declared)
    return Pairs(
        names=tuple(names),
        firsts=tuple(firsts),
        products=Products(left=left, right=right),
        left_out=pairs + tastes * len(columns) - len(names),
    )


def _wanted(
    columns: Mapping[str, range], declared: Container[frozenset[str]], *, tastes: bool
) -> Iterator[tuple[tuple[str, str], int, Iterator[tuple[int, int]]]]:
    """Yield names, number of products and products of all pairs, those of the first features first."""
    for name, own in columns.items() if tastes else ():
        yield (AD, name), len(own), zip(own, repeat(NOTHING), strict=False)
    for place, (other, right) in enumerate(columns.items()):
        for name, left in islice(columns.items(), place):
            if frozenset((name, other)) not in declared:
                yield (name, other), len(left) * len(right), product(left, right)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Misfit(ArrayValue):
    """Sums of scores and of their information by ad and product, (K, P)."""

    scores: Floats
    informations: Floats

    def __post_init__(self) -> None:
        for name in ("scores", "informations"):
            object.__setattr__(self, name, frozen_array(getattr(self, name)))
        if self.scores.ndim != 2 or self.scores.shape != self.informations.shape or (self.informations < 0).any():
            raise InputError("misfit: scores and informations must be a row per ad of the same products")

    def of(self, arms: int, products: int) -> Misfit:
        """Return the sums of the first arms and products; those of arms that were added since are 0."""
        return Misfit(
            **{
                name: np.pad(array, ((0, arms - len(array)), (0, max(0, products - array.shape[1]))))[:, :products]
                for name, array in (("scores", self.scores), ("informations", self.informations))
            }
        )

    def plus(self, other: Misfit) -> Misfit:
        """Return both together."""
        return Misfit(scores=self.scores + other.scores, informations=self.informations + other.informations)


def misfit_after(
    before: Misfit | None, settings: LearningSettings, data: Observations, chances: Floats, *, arms: int
) -> Misfit | None:
    """Return the sums with the displays of a window, whose click probabilities were estimated before; None if empty."""
    pairs = pairs_under(settings, arms)
    count = pairs.firsts[-1]
    if not count:
        return None
    rows = spread(len(data), max(1, MOST_ELEMENTS // count))
    scores, informations = score_sums(
        pairs.products,
        data.contexts[data.sessions[rows], : settings.dim],
        data.arms[rows],
        (data.clicked - chances)[rows],
        (chances * (1 - chances))[rows],
        count=arms,
    )
    window = Misfit(scores=scores, informations=informations)
    return window if before is None else before.of(arms, count).plus(window)


def evidence(misfit: Misfit | None, settings: LearningSettings, arms: int) -> tuple[MissedPair, ...]:
    """Return all pairs that are tested, those with the strongest evidence first; none before the second fold."""
    if misfit is None:
        return ()
    pairs = pairs_under(settings, arms)
    sums, found = misfit.of(arms, pairs.firsts[-1]), list[MissedPair]()
    for names, first, end in zip(pairs.names, pairs.firsts, pairs.firsts[1:], strict=False):
        parts = sums.scores[:, first:end], sums.informations[:, first:end]
        found.append(MissedPair(of=names, **asdict(evidence_of(*parts, common=names[0] != AD))))
    return tuple(sorted(found, key=lambda one: -one.deviations))


def missed(tested: Sequence[MissedPair]) -> tuple[MissedPair, ...]:
    """Return the pairs that a model misses, of those tested, the clearest first."""
    least = max(ALARM, tested[0].deviations / 2) if tested else ALARM
    clear = [one for one in tested[:MOST_MISSED] if one.deviations >= least]
    return tuple(one for one in clear if one.strength >= LEAST_STRENGTH)


def missed_by(parameters: Parameters) -> tuple[MissedPair, ...]:
    """Return the pairs that a version misses."""
    return missed(evidence(parameters.misfit, parameters.settings, len(parameters.arms)))


def advice(parameters: Parameters) -> list[str]:
    """Return what to do about each pair that a version misses, in a sentence."""
    features = parameters.settings.features
    has_names = features is not None and bool(features.context)  # else no cross can be declared
    return [_sentence(pair, has_names=has_names) for pair in missed_by(parameters)]


def _sentence(pair: MissedPair, *, has_names: bool = True) -> str:
    """Return what was found, and what to do.

    >>> _sentence(MissedPair(of=("device", "hour"), deviations=9.0, strength=0.4, arms=12))
    'device × hour matters to 12 ads (0.40): declare the cross, crosses = [["device", "hour"]]'
    >>> _sentence(MissedPair(of=(AD, "age"), deviations=9.0, strength=0.4, arms=12))
    'users differ by age in what they like (12 ads, 0.40): the model personal learns that'
    """
    (left, right), strength = pair.of, f"{pair.strength:.2f}"
    found = f"{pair.arms:,} {'ad' if pair.arms == 1 else 'ads'}"
    if left == AD:
        return f"users differ by {right} in what they like ({found}, {strength}): the model personal learns that"
    do = f'declare the cross, crosses = [["{left}", "{right}"]]' if has_names else "give the features names"
    return f"{left} × {right} matters to {found} ({strength}): {do}"
