"""Reports of `adcascade parameters show`: a version, or one of its ads."""

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
from worker.stream.contexts import SCALES
from worker.stream.features import listed
from worker.stream.misfit import advice, missed_by
from worker.stream.parameters import Parameters
from worker.stream.settings import SETTINGS
from worker.stream.tastes import AdProfile, context_columns, strengths

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
    deviations = model.widths(np.zeros((1, model.dim)))[0] if parameters.arms else np.zeros(0)
    return {
        **{name: getattr(parameters, name) for name in FACTS},
        "lift": None if parameters.lift is None else to_builtins(parameters.lift.figures),
        "guarded": parameters.guarded,
        "started_from": None if (start := parameters.started_from) is None else asdict(start),
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
        | {"features": None if settings.features is None else settings.features.document()}
        | {"tagged": None if settings.tagged is None else settings.tagged.version},
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
        f"  model {model}; contexts {_contexts(parameters)}",
        *_features(details["features"]),
        *([f"  {sentence}"] if (sentence := parameters.calibration.sentence) else []),
        *(f"  {one['sentence']}" for one in details["missed"]),
        f"  users without a click go on: {going_on}",
        *([f"  clicks by position: odds × {_listed(np.exp(effects))}"] if any(effects) else []),
        f"  forgetting {_forgetting(details)}",
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


def _contexts(parameters: Parameters) -> str:
    if parameters.standardisation is not None:
        return "standardised"
    return "not standardised yet" if parameters.awaits_standardisation else "as they come"


# ── for whom an ad works ─────────────────────────────────────────────────────────────────────────────────────────────


def profile_document(profile: AdProfile) -> dict[str, Any]:
    """Return an ad in its JSON form."""
    tastes = [{**asdict(taste), "difference": taste.difference} for taste in profile.tastes]
    return {**asdict(profile), "tastes": tastes}


def profile_report(parameters: Parameters, profile: AdProfile) -> str:
    """Return for whom an ad works: its base rate, and a table of its strongest tastes."""
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
    rows = [
        {**asdict(taste), "difference": taste.difference, "clear": "yes" if taste.is_clear else ""}
        for taste in profile.tastes
    ]
    return "\n".join([*lines, "", listing(TASTES, rows, TOP)])
