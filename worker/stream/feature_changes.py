"""Changes of the declared features while a model runs (docs/design.md §4, docs/math.md §13).

Rules that hold in this file:

- What is known is carried over by name: a number by its name, a mark of a category by name and value, a column of a
  hashed category by name, number of columns and its own number, a column of a cross by the two columns that it is made
  of. The order of a declaration means nothing. A renamed feature keeps its columns.
- The declaration of an order is whole. What it does not have is dropped.
- The context of a session has the columns of the version that served it. A version has the declaration before the last
  change (`FormerFeatures`), so the learner can read every session that is not over: while sessions of a former
  declaration may be open, another change of the features of contexts is refused.
- An arrival is encoded by the version that serves it. Names that only another known declaration has are ignored,
  and both names of a renamed feature are understood: clients and model need not change at the same time.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np

from worker.bandit.arrays import Floats, Ints
from worker.errors import InputError
from worker.stream.ad_features import scaled_ads
from worker.stream.contexts import recoded, stack_packed
from worker.stream.features import ContextEncoder, Feature, Features, FormerFeatures, context_encoder, listed
from worker.stream.joining import SessionPlan
from worker.stream.parameters import Parameters, first_model
from worker.stream.settings import Arm, LearningSettings
from worker.stream.tagged import TaggedVersion

Renamed = Mapping[str, str]


def features_of(document: Any) -> Features:
    """Return the declaration in an order; raise `InputError` if it makes no sense."""
    try:
        return msgspec.convert(document, Features)
    except msgspec.ValidationError as error:
        raise InputError(f"the features cannot be read: {error}") from None


def wanted_features(declared: Features, published: Features | None, renamed: Renamed) -> Features:
    """Return a declaration with what is known of its features; a part that it leaves out is the published one.

    Raise `InputError` if contexts are plain, or if a renamed feature does not fit.
    """
    context, ads, crosses = _parts(published)
    if declared.context and not context:
        raise InputError(
            "contexts of this model are lists of numbers: one with named features needs topics (--prefix) or a state "
            "folder of its own"
        )
    _check_renamed(declared, published, renamed)
    return Features(
        context=_known(declared.context, context, renamed) or context,
        ads=_known(declared.ads, ads, renamed) or ads,
        crosses=declared.crosses if declared.context else crosses,
    )


def _parts(features: Features | None) -> tuple[tuple[Feature, ...], tuple[Feature, ...], tuple[tuple[str, str], ...]]:
    return ((), (), ()) if features is None else (features.context, features.ads, features.crosses)


def renamed_in(before: Sequence[Feature], after: Sequence[Feature], renamed: Renamed) -> dict[str, str]:
    """Return the new names that concern these features: others may have the same names."""
    names, wanted = ({feature.name for feature in part} for part in (before, after))
    return {old: new for old, new in renamed.items() if old in names - wanted and new in wanted - names}


def _check_renamed(declared: Features, published: Features | None, renamed: Renamed) -> None:
    for old, new in renamed.items():
        pairs = zip(_parts(published)[:2], _parts(declared)[:2], strict=True)
        if not any(old in renamed_in(before, after, {old: new}) for before, after in pairs):
            raise InputError(
                f"{old!r} cannot become {new!r}: the published features must have the first and the declared ones the "
                "second, in place of it"
            )


def _known(declared: Sequence[Feature], published: Sequence[Feature], renamed: Renamed) -> tuple[Feature, ...]:
    """Return declared features with scales of ads, and first names, of the published ones that they continue."""
    names, known = renamed_in(published, declared, renamed), list[Feature]()
    for feature in declared:
        plain, before = feature.declared, _origin(feature, published, names)
        if before is not None and before.kind == feature.kind:
            first = "" if feature.kind == "number" or before.hash_name == feature.name else before.hash_name
            plain = msgspec.structs.replace(plain, centre=before.centre, scale=before.scale, hashed_as=first)
        known.append(plain)
    return tuple(known)


def _origin(feature: Feature, published: Sequence[Feature], renamed: Renamed) -> Feature | None:
    """Return the published feature that one continues; `renamed` concerns these."""
    by_name = {renamed.get(one.name, one.name): one for one in published}
    return by_name.get(feature.name)


# ── for people ───────────────────────────────────────────────────────────────────────────────────────────────────────


class Difference(NamedTuple):
    """A difference of two declarations: +, − or ~, the feature, and what it is or was."""

    sign: str
    name: str
    what: str


def differences(before: Features | None, after: Features | None, renamed: Renamed | None = None) -> list[Difference]:
    """Return what the declaration `after` has in place of `before`; their order means nothing.

    >>> before = Features.of_table({"context": {"age": "number", "device": ["mobile"]}})
    >>> after = Features.of_table({"context": {"device": ["mobile", "watch"], "years": "number"}})
    >>> [tuple(one) for one in differences(before, after, {"age": "years"})]
    [('+', 'device=watch', 'value of a category of contexts'), ('~', 'years', 'number of contexts, was age')]
    """
    renamed, found = renamed or {}, list[Difference]()
    for of, old, new in zip(("contexts", "ads"), _parts(before)[:2], _parts(after)[:2], strict=True):
        continued, names = set[str](), renamed_in(old, new, renamed)
        for feature in new:
            known = _origin(feature, old, names)
            continued |= {known.name} if known is not None else set()
            found += _of_feature(known, feature, of)
        found += [Difference("−", one.name, f"{_described(one)} of {of}") for one in old if one.name not in continued]
    names = renamed_in(_parts(before)[0], _parts(after)[0], renamed)
    crosses = [
        {frozenset(names.get(name, name) for name in pair): " × ".join(pair) for pair in _parts(one)[2]}
        for one in (before, after)
    ]
    for sign, these, others in (("+", crosses[1], crosses[0]), ("−", crosses[0], crosses[1])):
        found += [Difference(sign, name, "cross") for pair, name in these.items() if pair not in others]
    return found


def _of_feature(before: Feature | None, after: Feature, of: str) -> list[Difference]:
    what = f"{_described(after)} of {of}"
    if before is None:
        return [Difference("+", after.name, what)]
    if before.kind != after.kind or before.columns != after.columns:
        return [Difference("~", after.name, f"{what}, was {_described(before)}")]
    found = [Difference("~", after.name, f"{what}, was {before.name}")] if before.name != after.name else []
    for sign, these, others in (("+", after, before), ("−", before, after)):
        gone = [value for value in these.values if value not in others.values]
        found += [Difference(sign, f"{these.name}={value}", f"value of a category of {of}") for value in gone]
    return found


def _described(feature: Feature) -> str:
    return f"hashed category of {feature.columns} columns" if feature.kind == "hashed" else feature.kind


def differing(declared: Features | None, published: Features | None, most: int = 8) -> str:
    """Return in one line how a declaration differs from the published one; empty if not, or if it leaves a part out."""
    if declared is None:
        return ""
    found = differences(published, wanted_features(declared, published, {}))
    return listed((f"{one.sign} {one.name}" for one in found), most)


# ── columns ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _keys(part: Sequence[Feature], names: Renamed) -> list[Hashable]:
    """Return what identifies each column of some features; `names` are later names."""
    keys: list[Hashable] = []
    for feature in part:
        name = names.get(feature.name, feature.name)
        columns = feature.values or range(feature.width)
        keys += [(name, feature.kind, feature.columns, column) for column in columns]
    return keys


def _places(before: Sequence[Hashable], after: Sequence[Hashable]) -> Ints:
    places = {key: place for place, key in enumerate(before)}
    return np.array([places.get(key, -1) for key in after], dtype=np.intp)


def continued_columns(before: Sequence[Feature], after: Sequence[Feature], renamed: Renamed) -> Ints:
    """Return for each column of the features `after` the one of `before` that it continues, −1 for a new one."""
    return _places(_keys(before, renamed_in(before, after, renamed)), _keys(after, {}))


class Columns(NamedTuple):
    """For each column of contexts, of contexts in the model, and of ads, the one that it continues, −1 if none."""

    context: Ints
    model: Ints
    ads: Ints


def columns_of(before: LearningSettings, after: Features, renamed: Renamed) -> Columns:
    """Return how the columns under a declaration continue those under some settings."""
    context, ads, _ = _parts(before.features)
    ad_columns = continued_columns(ads, after.ads, renamed)
    if before.features is None or not context:
        same = np.arange(before.dim, dtype=np.intp)
        return Columns(same, same, ad_columns)
    keys = []
    for features, names in ((before.features, renamed_in(context, after.context, renamed)), (after, {})):
        whole = {one.name: (names.get(one.name, one.name), one.kind, one.columns) for one in features.context}
        keys.append(features.crossing.keys(_keys(features.context, names), whole))
    return Columns(continued_columns(context, after.context, renamed), _places(*keys), ad_columns)


def new_share(columns: Columns, after: Features) -> float:
    """Return the share of the features of contexts, crosses included, that are new."""
    if not after.context:
        return 0.0
    parts = np.split(columns.model, np.cumsum(after.widths)[:-1])
    return sum(bool((part < 0).all()) for part in parts) / len(parts)


def contexts_of(parameters: Parameters, plans: Sequence[SessionPlan]) -> Floats:
    """Return the contexts of sessions in the columns of a version, (n, d)."""
    former, features, dim = parameters.former, parameters.settings.features, parameters.settings.dim
    packed = [plan.context for plan in plans]
    if former is None or features is None or all(plan.parameters_version >= former.since for plan in plans):
        return stack_packed(packed, dim)
    contexts, old = np.empty((len(plans), dim)), np.array([plan.parameters_version < former.since for plan in plans])
    columns = continued_columns(former.context, features.context, former.renamed)
    earlier = stack_packed([one for one, is_old in zip(packed, old, strict=True) if is_old], _width(former.context))
    contexts[old] = recoded(earlier, columns, features.number_columns)
    contexts[~old] = stack_packed([one for one, is_old in zip(packed, old, strict=True) if not is_old], dim)
    return contexts


def _width(part: Sequence[Feature]) -> int:
    return sum(feature.width for feature in part)


def width_of_context(parameters: Parameters, version: int) -> int | None:
    """Return the length of the contexts of a version's sessions; None if its features are older than the former."""
    former = parameters.former
    if former is None or version >= former.since:
        return parameters.settings.dim
    return _width(former.context) if version >= former.first else None


# ── versions ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def recast(parameters: Parameters, features: Features, renamed: Renamed) -> Parameters:
    """Return a version under another declaration, with all that is known by name."""
    settings, known, pending = parameters.settings, parameters.standardisation, parameters.pending
    columns = columns_of(settings, features, renamed)
    names = renamed_in(_parts(settings.features)[1], features.ads, renamed)
    arms = tuple(_recast_arm(arm, features.ads, names) for arm in parameters.arms)
    features = replace(features, ads=scaled_ads(features.ads, arms))
    tagged = in_columns(settings.tagged, features, renamed)
    settings = replace(settings, features=features, dim=features.dim or settings.dim, tagged=tagged)
    if features.context:
        numbers = features.number_columns
        known = None if known is None else known.choose_columns(columns.context, numbers)
        pending = None if pending is None else pending.recoded(columns.context, numbers)
    return replace(
        parameters,
        settings=settings,
        arms=arms,
        model=parameters.model.with_columns(first_model(settings, arms), columns.model, columns.ads),
        misfit=None,
        standardisation=known,
        pending=pending,
    )


def in_columns(tagged: TaggedVersion | None, features: Features | None, renamed: Renamed) -> TaggedVersion | None:
    """Return a tagged version in the columns of a declaration; what it knows of other features is left out."""
    if tagged is None or features is None or not features.context:
        return tagged
    if (tagged.context, tagged.crosses) == (features.context, features.crosses):
        return tagged
    before = Features(context=tagged.context, crosses=tagged.crosses)
    columns = columns_of(LearningSettings(dim=before.dim, features=before), features, renamed)
    return tagged.choose_columns(features, columns.context, columns.model)


def _recast_arm(arm: Arm, ads: Sequence[Feature], renamed: Renamed) -> Arm:
    """Return an arm with those of its features that are declared, under their names."""
    texts = {feature.name: feature.kind != "number" for feature in ads}
    given = {renamed.get(name, name): value for name, value in arm.features}
    fitting = {name: value for name, value in given.items() if texts.get(name) is isinstance(value, str)}
    return replace(arm, features=tuple(fitting.items()))


class Declared(Protocol):
    """A version, as far as its declaration is concerned."""

    @property
    def settings(self) -> LearningSettings:
        """Its settings."""

    @property
    def former(self) -> FormerFeatures | None:
        """The features before the last change."""


def encoder_of(version: Declared, known: Iterable[Declared]) -> ContextEncoder | None:
    """Return the encoder of a version among others that clients may have in mind; None for plain contexts."""
    features = version.settings.features
    if features is None or not features.context:
        return None
    kinds: dict[str, str] = {feature.name: feature.kind for feature in features.context}
    lenient, aliases = set[str](), dict[str, str]()
    for one in known:
        for part in (_parts(one.settings.features)[0], one.former.context if one.former else ()):
            lenient |= {feature.name for feature in part if kinds.get(feature.name) != feature.kind}
        for old, new in one.former.renamed.items() if one.former else ():
            aliases |= {other: name for name, other in ((old, new), (new, old)) if name in kinds and other not in kinds}
    return ContextEncoder(features, frozenset(lenient), aliases) if lenient else context_encoder(features)
