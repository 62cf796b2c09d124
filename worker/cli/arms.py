"""`adcascade arms`: add, price and retire ads at run time."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from worker.cli.options.parser import JSON, CommandSpec, Option, number
from worker.cli.options.target import TARGET, control
from worker.console import check_writable, table, write_result
from worker.errors import InputError
from worker.stream.events import ArmChange
from worker.stream.parameters import Parameters
from worker.stream.settings import Arm

ARM = Option("arm", "id of the ad", positional=True)
REWARD = Option("reward", "reward of a click, above zero", parse=number(above=0), metavar="AMOUNT")


def listing(options: argparse.Namespace) -> int:
    """Show all arms."""
    check_writable(options.json)
    newest = control(options).history()[-1]
    arms = [asdict(arm) for arm in newest.arms]
    rows = [[arm.arm, f"{arm.reward:g}", "active" if arm.active else "retired"] for arm in newest.arms]
    write_result(options.json, {"version": newest.version, "arms": arms}, table(["arm", "reward", "state"], rows))
    return 0


def add(options: argparse.Namespace) -> int:
    """Add an arm, or bring a retired one back."""
    known = _known(options)
    if known is not None and known.active:
        raise InputError(f"arm {options.arm!r} is active already; `adcascade arms price` changes its reward")
    if options.reward is None and known is None:
        raise InputError("--reward is missing: the reward of a click on the new arm")
    reward = known.reward if options.reward is None and known is not None else options.reward
    return _change(
        options, ArmChange(arm=options.arm, reward=reward, active=True), "added" if known is None else "brought back"
    )


def price(options: argparse.Namespace) -> int:
    """Change the reward of an arm."""
    if options.reward is None:
        raise InputError("--reward is missing: the new reward")
    known = _existing(options)
    return _change(options, ArmChange(arm=options.arm, reward=options.reward, active=known.active), "priced")


def retire(options: argparse.Namespace) -> int:
    """Stop showing an arm; its estimate is kept."""
    known = _existing(options)
    return _change(options, ArmChange(arm=options.arm, reward=known.reward, active=False), "retired")


def _known(options: argparse.Namespace) -> Arm | None:
    check_writable(options.json)
    if not options.arm or len(options.arm) > 128 or not options.arm.isprintable():
        raise InputError("the arm id must have 1 to 128 printable characters")
    return next((arm for arm in control(options).history()[-1].arms if arm.arm == options.arm), None)


def _existing(options: argparse.Namespace) -> Arm:
    known = _known(options)
    if known is None:
        raise InputError(f"there is no arm {options.arm!r} (see adcascade arms list)")
    return known


def _change(options: argparse.Namespace, change: ArmChange, done: str) -> int:
    after: Parameters = control(options).order(change)
    record = {"version": after.version, "sha256": after.sha256, "arm": change.arm}
    text = f"{change.arm}: {done} at {change.reward:g}; version {after.version} is in force"
    write_result(options.json, record, text)
    return 0


def _action(name: str, run: Any, summary: str, example: str, *options: Option) -> CommandSpec:
    example = f"adcascade arms {name} {example}--state demo-state"
    return CommandSpec(name=name, summary=summary, examples=(example,), options=(*options, *TARGET, JSON), run=run)


COMMAND = CommandSpec(
    name="arms",
    summary="Add, price and retire ads; list them.",
    examples=(
        "adcascade arms list --state /var/lib/adcascade",
        "adcascade arms add winter-coat --reward 1.20 --state /var/lib/adcascade",
        "adcascade arms retire summer-hat --state /var/lib/adcascade",
        "adcascade arms add winter-coat --reward 1.20 --broker kafka:9092     # workers on Kafka",
    ),
    actions=(
        _action("list", listing, "Show all arms.", ""),
        _action(
            "add",
            add,
            "Add an arm, with the prior as its estimate, or bring a retired one back.",
            "winter-coat --reward 1.20 ",
            ARM,
            REWARD,
        ),
        _action("price", price, "Change the reward of an arm.", "winter-coat --reward 0.90 ", ARM, REWARD),
        _action("retire", retire, "Stop showing an arm; its estimate is kept.", "winter-coat ", ARM),
    ),
)
