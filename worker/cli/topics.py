"""`adcascade topics`: create the topics, or check those that exist."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from worker.cli.options.brokers import CONNECTION, connection, topic_names
from worker.cli.options.parser import JSON, CommandSpec, Option, integer
from worker.cli.options.times import Duration, duration
from worker.console import check_writable, say, table, write_json

if TYPE_CHECKING:
    from worker.kafka.topics import Finding, TopicLayout

OPTIONS = (
    Option(
        name="partitions",
        help="of arrivals, clicks, decisions and sessions [as there are, else 8]",
        parse=integer(least=1, most=10_000),
        metavar="N",
    ),
    Option(
        name="replication",
        help="replicas of each partition [3, or as many as there are brokers]",
        parse=integer(least=1, most=100),
        metavar="N",
    ),
    Option(
        name="retention",
        help="how long arrivals, clicks and decisions are kept [7d; as it is where they exist]",
        parse=duration,
    ),
    Option(
        name="journal-retention",
        help="how long journal, episodes and dead letters are kept; longer than any outage of the learner",
        parse=duration,
        default=Duration(30 * 86_400_000),
    ),
)


def create(options: argparse.Namespace) -> int:
    """Create what is missing."""
    from worker.kafka import topics as kafka_topics

    return _run(options, kafka_topics.create)


def check(options: argparse.Namespace) -> int:
    """Compare what there is with what has to be."""
    from worker.kafka import topics as kafka_topics

    return _run(options, kafka_topics.check)


def _run(options: argparse.Namespace, ask: Any) -> int:
    from worker.kafka.clients import run_client

    check_writable(options.json)
    link = connection(options)
    findings: Sequence[Finding] = run_client(link, ask(link, topic_names(options), _plan(options)))
    right = all(finding.state in ("right", "created") for finding in findings)
    write_json(options.json, {"right": right, "topics": [asdict(finding) for finding in findings]})
    if options.json != "-":
        _tell(findings, right)
    return 0 if right else 1


def _plan(options: argparse.Namespace) -> TopicLayout:
    from worker.kafka.topics import TopicLayout

    return TopicLayout(
        partitions=options.partitions,
        replication=options.replication,
        retention=None if options.retention is None else int(options.retention),
        journal_retention=int(options.journal_retention),
    )


def _tell(findings: Sequence[Finding], right: bool) -> None:
    rows = [[finding.topic, finding.partitions or "–", finding.replicas or "–", finding.state] for finding in findings]
    say(table(["topic", "partitions", "replicas", "state"], rows))
    if right:
        return
    say()
    for finding in findings:
        for difference in finding.differences:
            say(f"{finding.topic}: {difference}")
    if any(finding.state == "different" for finding in findings):
        say("What exists is never changed from here: use the tools of Kafka (kafka-configs, kafka-topics).")
    if any(finding.state == "missing" for finding in findings):
        say("`adcascade topics create` creates what is missing.")


COMMAND = CommandSpec(
    name="topics",
    summary="Create the topics of the workers, or check those that exist.",
    examples=("adcascade topics create --partitions 12", "adcascade topics check --broker kafka:9092"),
    actions=(
        CommandSpec(
            name="create",
            summary="Create what is missing; what exists is checked and left alone.",
            examples=(
                "adcascade topics create",
                "adcascade topics create --broker kafka:9092 --partitions 24 --replication 3 --retention 3d",
            ),
            options=(*OPTIONS, *CONNECTION, JSON),
            run=create,
        ),
        CommandSpec(
            name="check",
            summary="Say what differs from what the workers need; exit 1 if anything does.",
            examples=("adcascade topics check", "adcascade topics check --partitions 12 --json -"),
            options=(*OPTIONS, *CONNECTION, JSON),
            run=check,
        ),
    ),
)
