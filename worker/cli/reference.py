"""The tables of the README that the code knows best; `python -m worker.cli.reference README.md` writes them anew.

A table stands between ``<!-- generated: NAME -->`` and ``<!-- end of NAME -->``. A test holds that the file is what
this would write.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from worker.cli.main import COMMANDS, load
from worker.cli.options.parser import CommandSpec, Option
from worker.metrics import CATALOGUE
from worker.metrics.catalogue import POSITIONS, MetricSpec

#: A default that only the help text tells, because it is found out when the command runs.
_TOLD = re.compile(r"^(.*) \[([^\]]+)\]$")

#: How `replay` begins the help of what it shares with the worker.
_BORROWED = "with --relearn"


def metrics_table() -> str:
    """Return all metrics with their labels and what they mean."""
    return _table(
        ("metric", "kind", "labels", "what it is"),
        ((f"`{spec.name}`", spec.kind, _labels(spec), spec.help) for spec in CATALOGUE),
    )


def worker_table() -> str:
    """Return the options of `adcascade worker`."""
    return _table(("option", "default", "what it is"), map(_cells, load("worker").options))


def commands_table() -> str:
    """Return the options of all other commands that the worker does not have, or has with another meaning."""
    known = {_cells(option) for option in load("worker").options}
    users: dict[tuple[str, str, str], list[str]] = {}
    borrowed = []
    for name in COMMANDS:
        for command, option in _options(load(name)):
            if option.help.startswith(_BORROWED):
                borrowed.append(_name(option))
            elif name != "worker" and _cells(option) not in known:
                users.setdefault(_cells(option), []).append(command)
    rows = [(name, ", ".join(_together(of)), default, text) for (name, default, text), of in users.items()]
    rows.append(
        (", ".join(borrowed), "replay", "as recorded, else the worker's", f"{_BORROWED}: what they are for the worker")
    )
    return _table(("option", "of", "default", "what it is"), rows)


TABLES = {"metrics": metrics_table, "worker settings": worker_table, "other settings": commands_table}


def refreshed(text: str) -> str:
    """Return the text with all generated tables as they are now.

    >>> refreshed("<!-- generated: nothing -->")
    '<!-- generated: nothing -->'
    """
    for name, make in TABLES.items():
        begin, end = f"<!-- generated: {name} -->", f"<!-- end of {name} -->"
        place = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        if place.search(text):
            text = _replaced(place, text, f"{begin}\n{make()}\n{end}")
    return text


def _replaced(place: re.Pattern[str], text: str, new: str) -> str:
    return place.sub(lambda _: new, text)  # a function: in a text, backslashes would mean something


# ── cells ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _options(command: CommandSpec) -> Iterator[tuple[str, Option]]:
    for option in command.options:
        yield command.name, option
    for action in command.actions:
        for option in action.options:
            yield f"{command.name} {action.name}", option


def _cells(option: Option) -> tuple[str, str, str]:
    return (_name(option), _default(option), _help(option))


def _name(option: Option) -> str:
    if option.secret:
        return f"`{option.variable}`"
    shown = option.metavar or option.name.upper()
    if option.positional:
        return f"`{shown}`"
    if option.flag:
        return f"`--[no-]{option.name}`"
    return f"`--{option.name}`"


def _default(option: Option) -> str:
    told = _told(option)
    if option.default in (None, ()):
        return told[2] if told else ""
    if option.repeatable or isinstance(option.default, tuple):
        return ", ".join(f"`{value}`" for value in option.default)
    if option.flag:
        return "on" if option.default else "off"
    return f"`{option.default}`"


def _told(option: Option) -> re.Match[str] | None:
    return _TOLD.match(option.help) if option.default in (None, ()) else None


def _help(option: Option) -> str:
    told = _told(option)
    text = told[1] if told else option.help
    if option.choices:
        text += f" ({', '.join(f'`{choice}`' for choice in option.choices)})"
    return text


def _labels(spec: MetricSpec) -> str:
    return "; ".join(f"`{label}`{_values(spec, values)}" for label, values in spec.labels.items())


def _values(spec: MetricSpec, values: Sequence[str]) -> str:
    if spec.name == "adcascade_build_info":  # not the same on every machine
        return ""
    if tuple(values) == POSITIONS:
        return f": {values[0]} … {values[-2]}, {values[-1]}"
    return ": " + ", ".join(values)


def _together(commands: Sequence[str]) -> Iterator[str]:
    """Name a command once if all of its actions are there."""
    told = set()
    for name in commands:
        first = name.split()[0]
        actions = [f"{first} {action.name}" for action in load(first).actions]
        whole = len(actions) > 0 and all(action in commands for action in actions)
        shown = first if whole else name
        if shown not in told:
            told.add(shown)
            yield shown


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def main(arguments: Sequence[str]) -> int:
    """Write the tables of the file named."""
    path = Path(arguments[0])
    path.write_text(refreshed(path.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
