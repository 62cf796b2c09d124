"""`adcascade features`: change the declared features of a model that runs."""

from __future__ import annotations

import argparse
from functools import partial

from worker.cli.options.learning import setting
from worker.cli.options.parser import JSON, CommandSpec, Option, pair
from worker.cli.options.target import YES, action, control, publish
from worker.console import table
from worker.errors import InputError
from worker.stream.events import FeaturesChange
from worker.stream.feature_changes import differences, wanted_features

DECLARED = setting("features", help="features as they should be; a table that the file lacks stays as it is")
RENAME = Option(
    "rename",
    "feature with a new name, which keeps what is known of it; repeatable",
    parse=pair,
    repeatable=True,
    default=(),
    metavar="OLD=NEW",
)


def diff(options: argparse.Namespace) -> None:
    """Show the differences between the declared features of a settings file and the published ones."""
    _change(options, publishes=False)


def apply(options: argparse.Namespace) -> None:
    """Make the features those of a settings file, in one version: show the changes and ask for confirmation.

    What is known is carried over by name; workers and servers go on.
    """
    _change(options, publishes=True)


def _change(options: argparse.Namespace, *, publishes: bool) -> None:
    if options.features is None:
        raise InputError(
            "no features are declared: name a settings file that has [features.context] or [features.ads] (--config)"
        )
    target, renamed = control(options), dict(options.rename)
    newest = target.history()[-1]
    wanted = wanted_features(options.features, newest.settings.features, renamed)
    found = differences(newest.settings.features, wanted, renamed)
    shown, order = f"nothing to do: version {newest.version} has these features", None
    if found:
        shown = f"against version {newest.version}:\n{table(['', 'feature', 'what'], found)}"
    if found and publishes:
        order = FeaturesChange(features=wanted.declared.document(), renamed=renamed)
    changes, hint = [one._asdict() for one in found], "`adcascade features diff` shows them"
    publish(options, target, newest, order, changes=changes, shown=shown, hint=hint)


_action = partial(action, "features")

COMMAND = CommandSpec(
    name="features",
    summary="Change the declared features while serving and learning go on: compare a settings file, and apply it.",
    examples=(
        "adcascade features diff --config serve.toml --state /var/lib/adcascade",
        "adcascade features apply --config serve.toml --rename age=years --state /var/lib/adcascade",
        "adcascade features apply --config worker.toml --yes --broker kafka:9092     # workers on Kafka",
    ),
    actions=(
        _action("diff", diff, "--config serve.toml", DECLARED, RENAME, JSON),
        _action("apply", apply, "--config serve.toml", DECLARED, RENAME, YES, JSON),
    ),
)
