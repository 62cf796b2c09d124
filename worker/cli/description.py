"""Reports of `adcascade parameters`: versions, their differences, and single ads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import numpy as np

from worker.bandit.arrays import sigmoid
from worker.bandit.learning import AUTO
from worker.bandit.personal import PersonalModel
from worker.console import table
from worker.stream.chance import ALL
from worker.stream.contexts import SCALES
from worker.stream.parameters import Parameters
from worker.stream.settings import SETTINGS
from worker.stream.tastes import AdProfile, Taste, context_columns, strengths

TOP = 15  # rows of a table; --json has all
#: What is shown of a version as it is.
FACTS = (
    *("version", "sha256", "parent_sha256", "effective_at", "made_at", "window_end", "frozen"),
    *("folds", "clock", "kept", "observations", "explore_budget", "expected_sessions"),
)


def describe(parameters: Parameters) -> dict[str, Any]:
    """Return the facts of a version, for JSON and reports."""
    model, counts, rates = parameters.model, parameters.answers, parameters.rates
    deviations = model.bias_deviations if parameters.arms else np.zeros(0)
    return {
        **{name: getattr(parameters, name) for name in FACTS},
        "learn_shares": parameters.shares._asdict(),
        "parameter_norm": model.norm,
        "smallest_eigenvalue": model.smallest_eigenvalue if parameters.arms else None,
        "features": [{**asdict(one), "word": one.word} for one in strengths(parameters)],
        "position_effects": model.position_effects.tolist(),
        "position_answer_rates": None if rates is None else rates.positions.tolist(),
        "standardisation": _scales(parameters),
        "settings": _settings(parameters),
        "context": list(context_columns(parameters)),
        "theta_context": model.effects.tolist(),
        "arms": [
            {
                "arm": arm.arm,
                "reward": arm.reward,
                "active": arm.active,
                "log_odds": float(bias),
                "deviation": float(deviation),
                "probability": float(sigmoid(np.array([bias]))[0]),
                "answer_rate": None if rates is None else float(rates.arms[index]),
                "displays": None if counts is None else float(counts.displayed[:, index].sum()),
                "features": dict(arm.features),
            }
            for index, (arm, bias, deviation) in enumerate(zip(parameters.arms, model.biases, deviations, strict=True))
        ],
    }


def _scales(parameters: Parameters) -> dict[str, Any] | None:
    known = parameters.standardisation
    return None if known is None else {name: getattr(known, name) for name in SCALES}


def _settings(parameters: Parameters) -> dict[str, Any]:
    settings = parameters.settings
    plain = {name: getattr(settings, name) for name in SETTINGS}
    return {**plain, "features": None if settings.features is None else settings.features.document()}


def report(parameters: Parameters, details: dict[str, Any], kept: list[int]) -> str:
    """Return a version for people: its model, and its best arms."""
    settings, effects = details["settings"], details["position_effects"]
    span = str(kept[0]) if len(kept) == 1 else f"{kept[0]} to {kept[-1]}"
    best = sorted(details["arms"], key=lambda arm: -arm["probability"] * arm["reward"])
    rows = [
        [
            arm["arm"],
            f"{arm['reward']:.4g}",
            "yes" if arm["active"] else "retired",
            f"{arm['probability']:.4f}",
            f"{arm['log_odds']:+.3f}",
            f"{arm['deviation']:.3f}",
            _rate(arm["answer_rate"]),
        ]
        for arm in best[:TOP]
    ]
    lines = [
        f"version {details['version']}  {details['sha256'][:16]}…  {'frozen' if details['frozen'] else 'learning'}",
        f"  {details['folds']} folds, {details['observations']} observations; the workers keep {span}",
        f"  policy {settings['policy']}, bonus {settings['bonus']}, β {settings['beta']}, {settings['estimator']}",
        f"  model {_model(details)}; ‖θ‖ {details['parameter_norm']:.4g}; contexts {_contexts(parameters)}",
        *_features(details["features"]),
        f"  users without a click go on: {_going_on(details)}",
        *([f"  clicks by position: odds × {_listed(np.exp(effects))}"] if any(effects) else []),
        f"  forgetting {_forgetting(details)}",
        *([f"  {_shares(details)}"] if parameters.shares != ALL else []),
        "",
        table(["arm", "reward", "active", "click at x=0", "log-odds", "± deviation", "go on"], rows),
    ]
    more = [f"… and {len(best) - TOP} more (--json - has all)"] if len(best) > TOP else []
    return "\n".join([*lines, *more])


def _model(details: dict[str, Any]) -> str:
    settings = details["settings"]
    return settings["model"] if settings["intercept"] else f"{settings['model']} without an intercept"


def _features(strengths: list[dict[str, Any]]) -> list[str]:
    """Return which features decide between ads, and which of ads say how they are clicked, a line each."""
    lines = []
    for of, words in (("context", "what decides between ads"), ("ad", "features of ads that matter")):
        some = [one for one in strengths if one["of"] == of]
        more = f" and {len(some) - TOP} more" if len(some) > TOP else ""
        named = ", ".join(f"{one['feature']} {one['word']} ({one['strength']:.2f})" for one in some[:TOP])
        lines += [f"  {words}: {named}{more}"] if some else []
    return lines


def _going_on(details: dict[str, Any]) -> str:
    rates = details["position_answer_rates"]
    return "all (not learned)" if rates is None else f"by position × {_listed(rates)}"


def _listed(numbers: Iterable[float]) -> str:
    return ", ".join(f"{number:.3f}" for number in numbers)


def _forgetting(details: dict[str, Any]) -> str:
    setting, kept = details["settings"]["forgetting"], details["kept"]
    if setting != AUTO:
        return f"{setting:g} per window"
    return f"{setting}: " + (
        "the last fold kept all" if kept == 1 else f"change noticed, older sessions count {kept:g}"
    )


def _shares(details: dict[str, Any]) -> str:
    shares, most = details["learn_shares"], details["settings"]["learn_at_most"]
    return (
        f"learns from {shares['exploring']:.3g} of the sessions that explore and {shares['others']:.3g} of the others, "
        f"about {most:,} of {details['expected_sessions']:,} per window"
    )


def _contexts(parameters: Parameters) -> str:
    if parameters.standardisation is not None:
        return "standardised"
    return "not standardised yet" if parameters.awaits_standardisation else "as they come"


# ── differences ──────────────────────────────────────────────────────────────────────────────────────────────────────


def differences(old: Parameters, new: Parameters) -> dict[str, Any]:
    """Return the differences between two versions."""
    one, other = describe(old), describe(new)
    before = {arm["arm"]: arm for arm in one["arms"]}
    arms = []
    for arm in other["arms"]:
        was = before.get(arm["arm"])
        if was is None:
            change = "added"
        elif was["active"] != arm["active"]:
            change = "brought back" if arm["active"] else "retired"
        elif was["reward"] != arm["reward"]:
            change = f"priced {was['reward']:g} → {arm['reward']:g}"
        else:
            change = ""
        was = was or {**arm, "log_odds": 0.0}
        tastes = _tastes_moved(old, new, arm["arm"])
        if change or tastes or any(was[name] != arm[name] for name in ("log_odds", "deviation", "answer_rate")):
            arms.append(
                {
                    "arm": arm["arm"],
                    "change": change,
                    "log_odds_moved": arm["log_odds"] - was["log_odds"],
                    "tastes_moved": tastes,
                    "deviation_before": was["deviation"],
                    "deviation_after": arm["deviation"],
                    "answer_rate_before": was["answer_rate"],
                    "answer_rate_after": arm["answer_rate"],
                }
            )
    return {
        "from": old.version,
        "to": new.version,
        "observations": new.observations - old.observations,
        "folds": new.folds - old.folds,
        "settings": {
            name: [one["settings"][name], other["settings"][name]]
            for name in one["settings"]
            if one["settings"][name] != other["settings"][name]
        },
        "strengths": _strengths_moved(one["features"], other["features"]),
        "kept": new.kept,
        "context_moved": float(np.linalg.norm(new.model.effects - old.model.effects)),
        "arms": arms,
    }


def _strengths_moved(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the features whose strength has changed, with both strengths; None before the first fold."""
    before = {(one["of"], one["feature"]): one["strength"] for one in old}
    moved = [{**one, "before": before.get((one["of"], one["feature"]))} for one in new]
    return [one for one in moved if one["before"] != one["strength"]]


def _tastes_moved(old: Parameters, new: Parameters, arm: str) -> float:
    """Return how far the coefficients of contexts in the log-odds of an arm have moved."""
    before, after = old.indices.get(arm), new.indices[arm]
    if before is None:
        return 0.0
    return float(np.linalg.norm(new.model.head(after)[0][1:] - old.model.head(before)[0][1:]))


def difference_report(changes: dict[str, Any]) -> str:
    """Return the differences between two versions for people."""
    moved = sorted(changes["arms"], key=lambda arm: -abs(arm["log_odds_moved"]))
    rows = [
        [one["arm"], one["change"], f"{one['log_odds_moved']:+.4f}"]
        + [f"{one[name]:.3f}" for name in ("tastes_moved", "deviation_before", "deviation_after")]
        + [_rate(one["answer_rate_before"]), _rate(one["answer_rate_after"])]
        for one in moved[:TOP]
    ]
    header = ["arm", "change", "log-odds", "tastes by", "± before", "± after", "go on before", "after"]
    strengths = [
        f"{one['feature']} {'–' if one['before'] is None else format(one['before'], '.2f')} → {one['strength']:.2f}"
        for one in changes["strengths"][:TOP]
    ]
    lines = [
        f"version {changes['from']} → {changes['to']}: {changes['observations']:+} observations, "
        f"{changes['folds']:+} folds",
        *(f"  {name}: {one} → {other}" for name, (one, other) in changes["settings"].items()),
        *([f"  strength of features: {', '.join(strengths)}"] if strengths else []),
        f"  context: moved by {changes['context_moved']:.4g}",
        table(header, rows) if rows else "  the arms are the same",
    ]
    return "\n".join(lines)


def _rate(rate: float | None) -> str:
    return "–" if rate is None else f"{rate:.1%}"


# ── for whom an ad works ─────────────────────────────────────────────────────────────────────────────────────────────


def profile_document(profile: AdProfile) -> dict[str, Any]:
    """Return an ad in its JSON form."""
    tastes = [{**asdict(taste), "difference": taste.difference} for taste in profile.tastes]
    return {**asdict(profile), "tastes": tastes}


def profile_report(parameters: Parameters, profile: AdProfile) -> str:
    """Return for whom an ad works, in words and as a table of its strongest tastes."""
    low, high = sigmoid(np.array([profile.low, profile.high]))
    described = "".join(f", {name} {value}" for name, value in profile.features.items())
    lines = [
        f"{profile.arm}: reward {profile.reward:g}, {'active' if profile.active else 'retired'}{described} "
        f"(version {parameters.version})",
        f"  base rate: {profile.probability:.1%} click before features count ({low:.1%} … {high:.1%})",
    ]
    if profile.answer_rate is not None and profile.displays is not None:
        lines.append(f"  users who do not click: {profile.answer_rate:.1%} go on, of {profile.displays:,.0f} so far")
    if parameters.settings.model != PersonalModel.name:
        return "\n".join(
            [*lines, f"  the model {parameters.settings.model} has no tastes: a context moves all ads together"]
        )
    clear = [taste for taste in profile.tastes if taste.is_clear]
    for words, chosen in (
        ("works for", [taste for taste in clear if taste.difference > 0]),
        ("not for", [taste for taste in clear if taste.difference < 0]),
    ):
        if chosen:
            lines.append(f"  {words}: {', '.join(map(_who, chosen[:5]))}")
    if not clear:
        lines.append("  no taste is clear yet: all intervals contain the average ad")
    more = len(profile.tastes) - TOP
    lines += ["", _tastes(profile.tastes[:TOP]), *([f"… and {more} more (--json - has all)"] if more > 0 else [])]
    return "\n".join(lines)


def _who(taste: Taste) -> str:
    """Return the users whose clicks a taste raises against the average ad, or lowers."""
    are_marks = all("=" in part or "#" in part for part in taste.feature.split(" × "))
    return taste.feature if are_marks else f"high {taste.feature}"


def _tastes(tastes: tuple[Taste, ...]) -> str:
    rows = [
        [
            taste.feature,
            f"{taste.coefficient:+.3f}",
            f"{taste.low:+.3f} … {taste.high:+.3f}",
            f"{taste.average:+.3f}",
            f"{taste.difference:+.3f}",
            f"{taste.scale:.4g}",
            "yes" if taste.is_clear else "",
        ]
        for taste in tastes
    ]
    return table(["taste", "log-odds", "95 % interval", "average ad", "difference", "per", "clear"], rows)
