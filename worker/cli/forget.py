"""`adcascade forget`: find what is kept of a person, and delete what can be deleted."""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from worker.cli.options.brokers import SECURITY, connection
from worker.cli.options.parser import JSON, CommandSpec, Option
from worker.cli.options.source import kind_of_source
from worker.cli.options.target import PLACE, confirm
from worker.cli.serve import KEEP
from worker.console import listing, moment, note, write_result
from worker.erasure.folder import in_folder
from worker.erasure.person import Person, Place, in_logs
from worker.errors import InputError
from worker.stream.topology import Topics

#: Fields of a place in JSON.
FIELDS = ("name", "records", "first", "last", "until", "deletable", "note")
OPTIONS = (
    Option("log", "recorded log, without --state and --broker", positional=True, optional=True),
    Option("user", "user_id of the arrivals of a person", metavar="ID"),
    Option("session", "session_id; repeatable", repeatable=True, default=(), metavar="ID"),
    Option("dry-run", "search alone, without deleting", flag=True, default=False),
    Option("yes", "deletion without a confirmation", flag=True, default=False),
    *(replace(option, help=f"{option.help}; as the server has it") for option in KEEP),
    *PLACE,
    *SECURITY,
    JSON,
)


def run(options: argparse.Namespace) -> None:
    """Search, ask, and delete."""
    user, sessions = options.user, options.session
    if (user is None) == (not sessions):
        raise InputError("name a person by --user ID or by --session ID: one of them is needed, and not both")
    person = Person(user=user, sessions=set(sessions))
    who = f"user {user!r}" if user is not None else f"session {', '.join(map(repr, sessions))}"
    found = [place for place in _places(options, person) if place.records]
    if not found:
        raise InputError(f"there are no records of {who}: is the id right?")
    for session in sorted(set(sessions) - person.found):
        note(f"there are no records of session {session!r}")
    places = [{name: getattr(place, name) for name in FIELDS} for place in found]
    count = "" if user is None else f", {len(person.sessions):,} sessions"
    shown = f"{who}{count}; times are UTC\n{_table(places)}"
    deletable = sum(place.deletable for place in found)
    deleted = 0 if options.dry_run else deletable
    if deleted:
        if not options.yes:
            confirm(shown, "--dry-run only shows them", "Delete what can be deleted?")
        for place in found:
            place.delete()
    document = {"user": user, "sessions": sorted(person.sessions), "deleted": deleted, "places": places}
    done = f"deleted: {deleted:,}" if deletable else "nothing can be deleted now"
    asked = deleted and not options.yes  # and shown then
    write_result(options.json, document, shown if options.dry_run else done if asked else f"{shown}\n{done}")


def _places(options: argparse.Namespace, person: Person) -> list[Place]:
    """Search a log, a state folder or topics."""
    kind = kind_of_source(options)
    if kind == "log":
        if options.log == "-":
            raise InputError("the log is read twice, so it cannot be standard input: name a file")
        return in_logs([Path(options.log)], person)
    if kind == "state":
        return in_folder(Path(options.state), person, keep=options.keep, keep_record=options.keep_record)
    from worker.erasure.topics import in_topics  # with a Kafka client, which takes a while to import

    return in_topics(connection(options), Topics(options.prefix), person, now=time.time_ns() // 1_000_000)


def _table(places: list[dict[str, Any]]) -> str:
    rows = [place | {name: moment(place[name]) for name in ("first", "last", "until")} for place in places]
    counts = {"records": "{records:,}", "first": "{first}", "last": "{last}", "kept until": "{until}"}
    return listing({"where": "{name}", **counts, "deletable": "{deletable:,}", "": "{note}"}, rows)


COMMAND = CommandSpec(
    name="forget",
    summary=(
        "Find the records of a user or a session, and how long they are kept; then delete those that can be deleted:\n"
        "of a state folder that is not in use, and of the session table on Kafka. A log is never changed."
    ),
    examples=(
        "adcascade forget --session 7f3a-0193 --state /var/lib/adcascade --dry-run",
        "adcascade forget --user u-17 --broker kafka:9092 --yes",
        "adcascade forget log.gz --user u-17 --json -",
    ),
    options=OPTIONS,
    run=run,
)
