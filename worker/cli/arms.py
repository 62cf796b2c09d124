"""`adcascade arms`: add, price and retire ads at run time, one by one or by a file."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from msgspec import to_builtins

from worker.cli.options.catalog import check_id, features_of_pairs, read_arms
from worker.cli.options.parser import JSON, CommandSpec, Option, number, pair
from worker.cli.options.target import YES, LearnerControl, action, control, in_force, publish, version_facts
from worker.console import moment, table, write_result
from worker.errors import InputError
from worker.stream.ad_figures import all_figures
from worker.stream.catalogue import catalogue_difference, describe_changes
from worker.stream.events import ArmChange, ArmEntry, CatalogueChange
from worker.stream.features import Feature
from worker.stream.parameters import Parameters
from worker.stream.settings import Arm

ARM = Option("arm", "id of the ad", positional=True)
REWARD = Option("reward", "reward of a click, above zero", parse=number(above=0), metavar="AMOUNT")
FEATURE = Option(
    "feature", "feature of the ad; repeatable", parse=pair, repeatable=True, default=(), metavar="NAME=VALUE"
)
FILE = Option("file", "ads as they should be: JSON, CSV or TOML with arm, reward and features", positional=True)
DRY_RUN = Option("dry-run", "preview of the changes, without publishing them", flag=True, default=False)
TODAY = Option("today", "figures of the current day, UTC, in the table", flag=True, default=False)

#: Changes that are shown one by one.
SHOWN = 200
#: The figures of the table, with their formats.
FIGURES = {
    **dict.fromkeys(("displays", "clicks"), ",.0f"),
    "click_rate": ".2%",
    **dict.fromkeys(("revenue", "revenue_per_thousand"), ",.2f"),
    **dict.fromkeys(("answer_rate", "explored_share"), ".0%"),
}


def listing(options: argparse.Namespace) -> None:
    """Show the figures of all ads, those with the highest revenue first, and why an ad does badly.

    They are of the windows closed so far: since the start, or with --today of the current day, UTC.
    """
    newest = control(options).history()[-1]
    features = newest.settings.features
    names = [] if features is None else [feature.name for feature in features.ads]
    document, of = all_figures(newest), "today" if options.today else "total"
    rows = []
    for ad in sorted(document["arms"], key=lambda ad: -ad[of]["revenue"]):
        figures = ["–" if ad[of][name] is None else format(ad[of][name], form) for name, form in FIGURES.items()]
        arm = [ad["arm"], f"{ad['reward']:g}", "active" if ad["active"] else "retired"]
        rows.append([*arm, *figures, ad["note"] or "", *_shown(ad.get("features", {}), names)])
    header = ["arm", "reward", "state", *(name.replace("_", " ") for name in FIGURES), "note", *names]
    write_result(options.json, document, f"{_period(document)}\n{table(header, rows)}")


def _period(document: dict[str, Any]) -> str:
    """Return the time that the figures are of, as a line."""
    if not document["sessions"]:
        return "no window with sessions is closed yet"
    since, until = (moment(document[name], "%Y-%m-%d %H:%M") for name in ("since", "until"))
    today = f"{document['sessions_today']:,} of them on {document['day']}"
    return f"since {since}, until {until} (UTC): {document['sessions']:,} sessions, {today}"


def _document(entry: ArmEntry) -> dict[str, Any]:
    """Return an entry for machines, with features if it has any."""
    return {name: value for name, value in to_builtins(entry).items() if value is not None}


def _shown(given: Mapping[str, float | str], names: Sequence[str]) -> list[str]:
    return [f"{value:g}" if isinstance(value := given.get(name, ""), float) else value for name in names]


def add(options: argparse.Namespace) -> None:
    """Add an arm, with the prior as its estimate, or bring a retired one back."""
    target, newest, known = _look_up(options)
    if known is not None and known.active:
        raise InputError(f"arm {options.arm!r} is active already; `adcascade arms price` changes its reward")
    if options.reward is None and known is None:
        raise InputError("--reward is missing: the reward of a click on the new arm")
    reward = known.reward if options.reward is None and known is not None else options.reward
    features = None
    if known is None or options.feature:
        features = features_of_pairs(options.feature, _declared(newest), f"arm {options.arm!r}")
    change = ArmChange(arm=options.arm, reward=reward, active=True, features=features or None)
    _change(options, target, change, "added" if known is None else "brought back")


def price(options: argparse.Namespace) -> None:
    """Change the reward of an arm."""
    if options.reward is None:
        raise InputError("--reward is missing: the new reward")
    target, known = _existing(options)
    _change(options, target, ArmChange(arm=known.arm, reward=options.reward, active=known.active), "priced")


def retire(options: argparse.Namespace) -> None:
    """Stop showing an arm; its estimate is kept."""
    target, known = _existing(options)
    _change(options, target, ArmChange(arm=known.arm, reward=known.reward, active=False), "retired")


def _look_up(options: argparse.Namespace) -> tuple[LearnerControl, Parameters, Arm | None]:
    """Return the target, its newest version, and the arm that the options name, if that version has it."""
    check_id(options.arm)
    target = control(options)
    newest = target.history()[-1]
    return target, newest, next((arm for arm in newest.arms if arm.arm == options.arm), None)


def _existing(options: argparse.Namespace) -> tuple[LearnerControl, Arm]:
    target, _, known = _look_up(options)
    if known is None:
        raise InputError(f"there is no arm {options.arm!r} (see adcascade arms list)")
    return target, known


def _change(options: argparse.Namespace, target: LearnerControl, change: ArmChange, done: str) -> None:
    after = target.order(change)
    record = {**version_facts(after), "arm": change.arm}
    write_result(options.json, record, f"{change.arm}: {done} at {change.reward:g}; {in_force(after)}")


def _declared(newest: Parameters) -> tuple[Feature, ...] | None:
    """Return the features that an ad of this version must have; None if it may have any, as the first ad."""
    features = newest.settings.features
    ads = () if features is None else features.ads
    return None if not ads and not newest.arms else ads


# ── a whole catalogue ────────────────────────────────────────────────────────────────────────────────────────────────


def sync(options: argparse.Namespace) -> None:
    """Make the active arms those of a file, in one version: show the changes and ask for confirmation."""
    target = control(options)
    newest = target.history()[-1]
    wanted = read_arms(options.file, name="FILE", declared=_declared(newest))
    changes = catalogue_difference(newest.arms, wanted)
    same = f"nothing to do: version {newest.version} has the arms of {options.file}"
    shown = _difference(newest, changes, options.file) if changes else same
    order = CatalogueChange(changes=changes) if changes and not options.dry_run else None
    listed = [_document(change) for change in changes]
    publish(options, target, newest, order, changes=listed, shown=shown, hint="--dry-run shows them")


def _difference(newest: Parameters, changes: Sequence[ArmEntry], file: str) -> str:
    rows = describe_changes(newest.arms, changes)
    counted = Counter(sign for sign, _, _ in rows)
    kinds = f"{counted['+']} added, {counted['−']} retired, {counted['~']} changed"
    return f"{file} against version {newest.version}: {kinds}\n{table(['', 'arm', 'reward'], rows, SHOWN)}"


_action = partial(action, "arms")

COMMAND = CommandSpec(
    name="arms",
    summary="Add, price, retire and list ads, or make them those of a file.",
    examples=(
        "adcascade arms list --state /var/lib/adcascade",
        "adcascade arms add winter-coat --reward 1.20 --state /var/lib/adcascade",
        "adcascade arms add rain-coat --reward 1.20 --feature price=89.9 --feature brand=north --state adcascade-state",
        "adcascade arms retire summer-hat --state /var/lib/adcascade",
        "adcascade arms add winter-coat --reward 1.20 --broker kafka:9092     # workers on Kafka",
        "adcascade arms sync arms.csv --broker kafka:9092 --dry-run",
    ),
    actions=(
        _action("list", listing, "", TODAY, JSON),
        _action("add", add, "winter-coat --reward 1.20", ARM, REWARD, FEATURE, JSON),
        _action("price", price, "winter-coat --reward 0.90", ARM, REWARD, JSON),
        _action("retire", retire, "winter-coat", ARM, JSON),
        _action("sync", sync, "arms.csv", FILE, DRY_RUN, YES, JSON),
    ),
)
