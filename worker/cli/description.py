"""Reports of `adcascade parameters`: versions, their differences, and single ads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import numpy as np
from msgspec import to_builtins

from worker.bandit.arrays import sigmoid
from worker.bandit.learning import AUTO
from worker.bandit.personal import PersonalModel
from worker.console import listing
from worker.stream.chance import ALL
from worker.stream.contexts import SCALES
from worker.stream.features import listed
from worker.stream.misfit import advice, missed_by
from worker.stream.parameters import Parameters
from worker.stream.settings import SETTINGS
from worker.stream.tastes import AdProfile, Taste, context_columns, strengths

TOP = 15  # rows of a table; --json has all
#: What is shown of a version as it is.
FACTS = (
    *("version", "sha256", "parent_sha256", "effective_at", "made_at", "window_end", "frozen"),
    *("folds", "clock", "kept", "changed", "observations", "explore_budget", "expected_sessions"),
)

ARMS = {
    "arm": "{arm}",
    "reward": "{reward:.4g}",
    "active": "{state}",
    "click at x=0": "{probability:.4f}",
    "log-odds": "{log_odds:+.3f}",
    "± deviation": "{deviation:.3f}",
    "go on": "{answer_rate:.1%}",
}
CHANGED_ARMS = {
    "arm": "{arm}",
    "change": "{change}",
    "log-odds": "{log_odds_moved:+.4f}",
    "tastes by": "{tastes_moved:.3f}",
    "± before": "{deviation_before:.3f}",
    "± after": "{deviation_after:.3f}",
    "go on before": "{answer_rate_before:.1%}",
    "after": "{answer_rate_after:.1%}",
}
TASTES = {
    "taste": "{feature}",
    "log-odds": "{coefficient:+.3f}",
    "95 % interval": "{low:+.3f} … {high:+.3f}",
    "average ad": "{average:+.3f}",
    "difference": "{difference:+.3f}",
    "per": "{scale:.4g}",
    "clear": "{clear}",
}


def describe(parameters: Parameters) -> dict[str, Any]:
    """Return the facts of a version, for JSON and reports."""
    model, counts, rates = parameters.model, parameters.answers, parameters.rates
    settings, scales = parameters.settings, parameters.standardisation
    deviations = model.bias_deviations if parameters.arms else np.zeros(0)
    return {
        **{name: getattr(parameters, name) for name in FACTS},
        "learn_shares": parameters.shares._asdict(),
        "lift": None if parameters.lift is None else to_builtins(parameters.lift.figures),
        "guarded": parameters.guarded,
        "started_from": None if (start := parameters.started_from) is None else asdict(start),
        "parameter_norm": model.norm,
        "smallest_eigenvalue": model.smallest_eigenvalue if parameters.arms else None,
        "features": [{**asdict(one), "word": one.word} for one in strengths(parameters)],
        "calibration": _calibration(parameters),
        "missed": [
            to_builtins(pair) | {"sentence": sentence}
            for pair, sentence in zip(missed_by(parameters), advice(parameters), strict=True)
        ],
        "position_effects": model.position_effects.tolist(),
        "position_answer_rates": None if rates is None else rates.positions.tolist(),
        "standardisation": None if scales is None else {name: getattr(scales, name) for name in SCALES},
        "settings": {name: getattr(settings, name) for name in SETTINGS}
        | {"features": None if settings.features is None else settings.features.document()},
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


def report(parameters: Parameters, details: dict[str, Any], kept: list[int]) -> str:
    """Return a version for people: its model, and its best arms."""
    settings, effects, rates = details["settings"], details["position_effects"], details["position_answer_rates"]
    span = str(kept[0]) if len(kept) == 1 else f"{kept[0]} to {kept[-1]}"
    model = settings["model"] if settings["intercept"] else f"{settings['model']} without an intercept"
    start = parameters.started_from
    guarded = "; the guardrail has stopped exploration" if parameters.guarded else ""
    going_on = "all (not learned)" if rates is None else f"by position × {_listed(rates)}"
    arms = [{**arm, "state": "yes" if arm["active"] else "retired"} for arm in details["arms"]]
    lines = [
        f"version {details['version']}  {details['sha256'][:16]}…  {'frozen' if details['frozen'] else 'learning'}",
        f"  {details['folds']} folds, {details['observations']} observations; the workers keep {span}",
        *([f"  started from a history: sha256 {start.sha256[:16]}…, trust {start.trust:g}"] if start else []),
        f"  policy {settings['policy']}, bonus {settings['bonus']}, β {settings['beta']}, {settings['estimator']}",
        f"  model {model}; ‖θ‖ {details['parameter_norm']:.4g}; contexts {_contexts(parameters)}",
        *_features(details["features"]),
        *([f"  {sentence}"] if (sentence := parameters.calibration.sentence) else []),
        *(f"  {one['sentence']}" for one in details["missed"]),
        f"  users without a click go on: {going_on}",
        *([f"  clicks by position: odds × {_listed(np.exp(effects))}"] if any(effects) else []),
        f"  forgetting {_forgetting(details)}",
        *([f"  {_shares(details)}"] if parameters.shares != ALL else []),
        *([f"  {parameters.lift.sentence}, {parameters.lift.size}{guarded}"] if parameters.lift is not None else []),
        "",
        listing(ARMS, sorted(arms, key=lambda arm: -arm["probability"] * arm["reward"]), TOP),
    ]
    return "\n".join(lines)


def _calibration(parameters: Parameters) -> dict[str, Any] | None:
    """Return how well clicks were predicted, and the ads that differ most; None before the second fold."""
    known = parameters.calibration
    if known.ratio is None:
        return None
    worst = known.worst([arm.arm for arm in parameters.arms])
    return {**known.total, "ratio": known.ratio._asdict(), "loss": known.loss, "worst": to_builtins(worst)}


def _features(strengths: list[dict[str, Any]]) -> list[str]:
    """Return which features decide between ads, and which of ads say how they are clicked, a line each."""
    lines = []
    for of, words in (("context", "what decides between ads"), ("ad", "features of ads that matter")):
        named = [f"{one['feature']} {one['word']} ({one['strength']:.2f})" for one in strengths if one["of"] == of]
        lines += [f"  {words}: {listed(named, TOP)}"] if named else []
    return lines


def _listed(numbers: Iterable[float]) -> str:
    return ", ".join(f"{number:.3f}" for number in numbers)


def _forgetting(details: dict[str, Any]) -> str:
    setting, kept = details["settings"]["forgetting"], details["kept"]
    if setting != AUTO:
        return f"{setting:g} per window"
    noticed = [f"{', '.join(details['changed'])} changed and began anew"] if details["changed"] else []
    noticed += [f"change noticed, older sessions count {kept:g}"] if kept < 1 else []
    return f"{setting}: " + ("; ".join(noticed) or "the last fold kept all")


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
    strengths = {(feature["of"], feature["feature"]): feature["strength"] for feature in one["features"]}
    # A feature has no strength before the first fold.
    features = [
        {**feature, "before": strengths.get((feature["of"], feature["feature"]))} for feature in other["features"]
    ]
    arms = [_arm_moved(before.get(arm["arm"]), arm, _tastes_moved(old, new, arm["arm"])) for arm in other["arms"]]
    settings = {name: [value, other["settings"][name]] for name, value in one["settings"].items()}
    return {
        "from": old.version,
        "to": new.version,
        "observations": new.observations - old.observations,
        "folds": new.folds - old.folds,
        "settings": {name: values for name, values in settings.items() if values[0] != values[1]},
        "strengths": [feature for feature in features if feature["before"] != feature["strength"]],
        "kept": new.kept,
        "context_moved": float(np.linalg.norm(new.model.effects - old.model.effects)),
        "arms": [arm for arm in arms if arm is not None],
    }


def _arm_moved(was: dict[str, Any] | None, arm: dict[str, Any], tastes: float) -> dict[str, Any] | None:
    """Return the changes of an arm; None if there are none."""
    change = ""
    if was is None:
        was, change = {**arm, "log_odds": 0.0}, "added"
    elif was["active"] != arm["active"]:
        change = "brought back" if arm["active"] else "retired"
    elif was["reward"] != arm["reward"]:
        change = f"priced {was['reward']:g} → {arm['reward']:g}"
    if not (change or tastes or any(was[name] != arm[name] for name in ("log_odds", "deviation", "answer_rate"))):
        return None
    return {
        "arm": arm["arm"],
        "change": change,
        "log_odds_moved": arm["log_odds"] - was["log_odds"],
        "tastes_moved": tastes,
        "deviation_before": was["deviation"],
        "deviation_after": arm["deviation"],
        "answer_rate_before": was["answer_rate"],
        "answer_rate_after": arm["answer_rate"],
    }


def _tastes_moved(old: Parameters, new: Parameters, arm: str) -> float:
    """Return how far the coefficients of contexts in the log-odds of an arm have moved."""
    before, after = old.indices.get(arm), new.indices[arm]
    if before is None:
        return 0.0
    return float(np.linalg.norm(new.model.head(after)[0][1:] - old.model.head(before)[0][1:]))


def difference_report(changes: dict[str, Any]) -> str:
    """Return the differences between two versions for people."""
    moved = sorted(changes["arms"], key=lambda arm: -abs(arm["log_odds_moved"]))
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
        listing(CHANGED_ARMS, moved, TOP) if moved else "  the arms are the same",
    ]
    return "\n".join(lines)


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
        lines.append(f"  the model {parameters.settings.model} has no tastes: a context moves all ads together")
        return "\n".join(lines)
    clear = [taste for taste in profile.tastes if taste.is_clear]
    for words, sign in (("works for", 1), ("not for", -1)):
        if users := [_users(taste) for taste in clear if sign * taste.difference > 0]:
            lines.append(f"  {words}: {', '.join(users[:5])}")
    if not clear:
        lines.append("  no taste is clear yet: all intervals contain the average ad")
    rows = [
        {**asdict(taste), "difference": taste.difference, "clear": "yes" if taste.is_clear else ""}
        for taste in profile.tastes
    ]
    return "\n".join([*lines, "", listing(TASTES, rows, TOP)])


def _users(taste: Taste) -> str:
    """Return the users whose clicks a taste raises against the average ad, or lowers."""
    are_marks = all("=" in part or "#" in part for part in taste.feature.split(" × "))
    return taste.feature if are_marks else f"high {taste.feature}"
