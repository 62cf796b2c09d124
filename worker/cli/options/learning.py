"""Options of serving and learning, of the limits on input records, and of simulated worlds.

Every field of `LearningSettings` but `tagged` is an option, and has its default there.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from worker.bandit import MODELS
from worker.bandit.bonuses import BONUSES
from worker.bandit.estimators import ESTIMATORS
from worker.bandit.learning import AUTO
from worker.bandit.policies import POLICIES, Fixed
from worker.cli.options.parser import Option, count, defaulted, grouped, number
from worker.cli.options.times import time_option
from worker.errors import InputError
from worker.simulation.environments import LASTING
from worker.stream.decoding import MAX_FACT_LEAD, Limits
from worker.stream.features import Feature, Features
from worker.stream.settings import ANSWERS, CONTROLS, TAG, UNANSWERED, LearningSettings

_SHARE = number(least=0, most=1)


def id_list(text: str) -> tuple[str, ...]:
    """Read ids of ads, separated by commas."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


_LEARNING = grouped(
    "serving and learning",
    count("dim", "number d of context features (default: that of [features.context] or the published parameters)"),
    count("horizon", "maximum number H of displays in a session"),
    Option("repeats", "repeated displays of an arm within a session", flag=True),
    Option("model", "click model: personal learns tastes, additive moves all ads together", choices=MODELS),
    Option("intercept", "base rate shared by all ads; without it, additive is the model of the paper", flag=True),
    Option("answers", "share of users who go on after no click: learned, or all of them", choices=ANSWERS),
    Option("policy", "policy that chooses the slates", choices=POLICIES),
    Option(
        "order",
        "ads that the policy or the control fixed shows first, ID,…; the others follow in the order of the catalogue",
        parse=id_list,
        metavar="LIST",
    ),
    Option("epsilon", "share of random choices, for epsilon-greedy", parse=_SHARE),
    Option("bonus", "exploration bonus added to Q", choices=BONUSES),
    Option("beta", "strength of exploration, in standard deviations", parse=number(least=0)),
    Option(
        "spread",
        "difference between sessions in their optimism, 0 to 1, so that new ads share out the displays",
        parse=_SHARE,
    ),
    Option("estimator", "method that folds a window into the estimate", choices=ESTIMATORS),
    Option(
        "ridge",
        "precision of the effects that all ads share; 1: that of tastes at first (without an intercept: λ of λI)",
        parse=number(above=0),
    ),
    Option(
        "forgetting",
        "share of older displays that each fold keeps; auto: as much as the window itself confirms; 1: all",
        parse=number(AUTO, above=0, most=1),
    ),
    count("warmup", "number of initial folds with random slates", least=0),
    count("horizon-episodes", "number T of episodes over which exploration is spread", least=2),
    Option("random-share", "share of sessions with random slates, for `adcascade evaluate`", parse=_SHARE),
    Option(
        "control-share",
        "share of users, or else sessions, in the control group, which shows what adcascade earns",
        parse=number(least=0, below=1),
    ),
    Option(
        "control",
        "slates of the control group: a fixed order, the ads that are most popular (earn most per display), random "
        "ones, the greedy choice, or with tag:NAME that of the version with this tag",
        metavar=f"{{{','.join((*CONTROLS, TAG))}NAME}}",
    ),
    Option(
        "max-loss",
        "loss against the control group, as a share of its revenue, that stops exploration once it is certain; 0: none",
        parse=_SHARE,
    ),
    count("guardrail-sessions", "compared sessions before which --max-loss does nothing", least=0),
    Option("salt", "salt of the hashes behind random choices", metavar="TEXT"),
    time_option("session-timeout", "time after the arrival during which feedback counts"),
    time_option("lateness", "maximum delay of a record"),
    time_option("window", "length of an episode"),
    Option(
        "unanswered", "meaning of a display without feedback; passed where only clicks are reported", choices=UNANSWERED
    ),
    Option("standardise", "standardisation of numbers in contexts, by the first sessions", flag=True),
    Option(
        "features",
        "features of users in [features.context], of ads in [features.ads]: number, boolean, values or hashed; crosses",
        parse=Features.of_table,
        table=True,
    ),
)
LEARNING = defaulted(LearningSettings, *_LEARNING)

_LIMITS = grouped(
    "limits on input records",
    count("max-record-bytes", "maximum size of a record, in bytes"),
    Option("max-norm", "maximum norm of the vector of context and arm", parse=number(least=1)),
    count("max-exclude", "maximum number of excluded arms in an arrival", least=0),
    time_option(
        "max-ahead",
        "maximum lead of an event time over its record's timestamp and over the clock",
        most=MAX_FACT_LEAD,  # the learner refuses events that are further ahead
    ),
    time_option(
        "max-behind", "maximum lag of an event time behind its record's timestamp, beyond session timeout and lateness"
    ),
)
LIMITS = defaulted(Limits, *_LIMITS)


def setting(name: str, **changes: Any) -> Option:
    """Return the option of one setting, changed for another command.

    >>> setting("horizon", default=3).help
    'maximum number H of displays in a session'
    """
    return replace(next(option for option in LEARNING if option.name == name), group="options", **changes)


#: The options of a simulated world; each command has its defaults.
WORLD = (
    Option("environment", "simulated world", choices=LASTING),
    count("dim", "number d of context features"),
    count("arms", "number K of arms"),
    Option(
        "stay",
        "share of the users without a click who go on, multiplied by that of the arm",
        parse=number(above=0, most=1),
    ),
    *map(setting, ("horizon", "repeats")),
)
SEED = count("seed", "random seed of the world and its users", 0, least=0)


def context_dim(options: argparse.Namespace) -> int | None:
    """Return the number of context columns: that of the declared features, else that of --dim, which may be None.

    Raise `InputError` if both are given and differ.
    """
    declared: Features | None = options.features
    given: int | None = options.dim
    if declared is None or not declared.context:
        return given
    if given is not None and given != declared.dim:
        raise InputError(
            f"--dim is {given}, but the declared features of contexts have {declared.dim} columns: leave --dim out"
        )
    return declared.dim


def declared_ads(options: argparse.Namespace) -> tuple[Feature, ...] | None:
    """Return the declared features of ads; None if none are declared, so that the catalogue may have any."""
    declared: Features | None = options.features
    return declared.ads or None if declared is not None else None


def check_fixed(options: argparse.Namespace) -> None:
    """Raise `InputError` if an order is given where nothing is fixed."""
    controlled = getattr(options, "control_share", None) and options.control in (None, Fixed.name)
    policies = options.policy if isinstance(options.policy, tuple | list) else [options.policy]  # `simulate`: several
    if options.order and Fixed.name not in policies and not controlled:
        raise InputError(
            "--order is for --policy fixed, and for a control group with --control fixed: other policies find an order"
        )
