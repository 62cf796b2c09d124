"""`adcascade features`: change the declared features of a model that runs."""

from __future__ import annotations

import argparse
from functools import partial

from worker.cli.options.learning import setting
from worker.cli.options.parser import JSON, CommandSpec, Option, pair
from worker.cli.options.target import YES, action, control, publish, version_facts
from worker.console import table, write_result
from worker.errors import InputError
from worker.stream.events import FeaturesChange
from worker.stream.feature_changes import Difference, differences, wanted_features
from worker.stream.features import Features
from worker.stream.parameters import Parameters

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
    newest = control(options).history()[-1]
    _, found = _wanted(options, newest)
    _write(options, newest, found)


def apply(options: argparse.Namespace) -> None:
    """Make the features those of a settings file, in one version: show the changes and ask for confirmation.

    What is known is carried over by name; workers and servers go on.
    """
    target = control(options)
    newest = target.history()[-1]
    wanted, found = _wanted(options, newest)
    if not found:
        _write(options, newest, found)
        return
    order = FeaturesChange(features=wanted.declared.document(), renamed=dict(options.rename))
    changes, preview = [one._asdict() for one in found], "`adcascade features diff` shows them"
    publish(options, target, order, changes, _shown(newest, found), preview)


def _wanted(options: argparse.Namespace, newest: Parameters) -> tuple[Features, list[Difference]]:
    declared: Features | None = options.features
    if declared is None:
        raise InputError(
            "no features are declared: name a settings file that has [features.context] or [features.ads] (--config)"
        )
    renamed, published = dict(options.rename), newest.settings.features
    wanted = wanted_features(declared, published, renamed)
    return wanted, differences(published, wanted, renamed)


def _write(options: argparse.Namespace, newest: Parameters, found: list[Difference]) -> None:
    record = {"changes": [one._asdict() for one in found], **version_facts(newest)}
    write_result(options.json, record, _shown(newest, found))


def _shown(newest: Parameters, found: list[Difference]) -> str:
    if not found:
        return f"nothing to do: version {newest.version} has these features"
    return f"against version {newest.version}:\n{table(['', 'feature', 'what'], found)}"


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
