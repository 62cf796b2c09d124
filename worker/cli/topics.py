"""`adcascade topics`: create the topics, check the existing ones, or import a state folder."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from functools import partial
from pathlib import Path

from worker.cli.options.brokers import CONNECTION, connection
from worker.cli.options.parser import JSON, CommandSpec, Option, count, filled
from worker.cli.options.times import time_option
from worker.console import table, write_result
from worker.stream.events import MOST_PARTITIONS
from worker.stream.topology import Topics

OPTIONS = (
    count(
        "partitions",
        "partitions of arrivals, clicks, decisions and sessions (default: as they are where they exist, else 8)",
        most=MOST_PARTITIONS,
    ),
    count("replication", "replicas of each partition (default: 3, or as many as there are brokers)", most=100),
    time_option("retention", "retention of arrivals, clicks and decisions (default: 7d; as it is where they exist)"),
    time_option(
        "journal-retention",
        "retention of journal, episodes and dead letters; longer than any outage of the learner",
        30 * 86_400_000,
    ),
)


def _run(options: argparse.Namespace, *, create: bool) -> int:
    from worker.kafka import topics

    layout = filled(topics.TopicLayout, options)
    findings = topics.check(connection(options), Topics(options.prefix), layout, create=create)
    right = all(finding.state in ("right", "created") for finding in findings)
    rows = [[finding.topic, finding.partitions or "–", finding.replicas or "–", finding.state] for finding in findings]
    lines = [f"{finding.topic}: {difference}" for finding in findings for difference in finding.differences]
    if any(finding.state == "different" for finding in findings):
        lines.append("Existing topics are never changed: use the tools of Kafka (kafka-configs, kafka-topics).")
    if any(finding.state == "missing" for finding in findings):
        lines.append("`adcascade topics create` creates the missing topics.")
    text = "\n".join([table(["topic", "partitions", "replicas", "state"], rows), *([] if right else ["", *lines])])
    write_result(options.json, {"right": right, "topics": [asdict(finding) for finding in findings]}, text)
    return 0 if right else 1


def import_(options: argparse.Namespace) -> None:
    """Import the state folder of `adcascade serve` into the topics."""
    from worker.serve.moving import move

    moved = move(Path(options.folder), connection(options), Topics(options.prefix))
    text = (
        f"imported: version {moved.version}, {moved.kept_versions} versions in the history, {moved.sessions} "
        f"sessions, {moved.journal} records of the journal\nStart workers on these topics; `adcascade serve` will not "
        "use the folder again."
    )
    write_result(options.json, asdict(moved), text)


COMMAND = CommandSpec(
    name="topics",
    summary="Create the topics of the workers, check the existing ones, or fill new ones from a state folder.",
    examples=("adcascade topics create --partitions 12", "adcascade topics check --broker kafka:9092"),
    actions=(
        CommandSpec(
            name="create",
            summary="Create the missing topics; check the existing ones and leave them as they are.",
            examples=(
                "adcascade topics create",
                "adcascade topics create --broker kafka:9092 --partitions 24 --replication 3 --retention 3d",
            ),
            options=(*OPTIONS, *CONNECTION, JSON),
            run=partial(_run, create=True),
        ),
        CommandSpec(
            name="check",
            summary="Compare the topics with what the workers need; exit 1 if they differ.",
            examples=("adcascade topics check", "adcascade topics check --partitions 12 --json -"),
            options=(*OPTIONS, *CONNECTION, JSON),
            run=partial(_run, create=False),
        ),
        CommandSpec(
            name="import",
            summary=(
                "Import the state folder of `adcascade serve` into new topics: versions, open sessions, and the part\n"
                "of the journal that is not learned yet. For a service that outgrows one machine."
            ),
            examples=("adcascade topics create && adcascade topics import adcascade-state",),
            options=(Option("folder", "state folder of `adcascade serve`", positional=True), *CONNECTION, JSON),
            run=import_,
        ),
    ),
)
