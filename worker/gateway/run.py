"""A gateway from its settings to its end, and its metrics, in addition to those of the HTTP interface."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from prometheus_client import CollectorRegistry

from worker.client.exchange import Exchange
from worker.client.kafka import KafkaTransport
from worker.console import stops_on_signals
from worker.gateway.service import KafkaAdService
from worker.http.server import http_server
from worker.http.settings import HttpSettings
from worker.kafka.connection import Connection
from worker.kafka.parameters import VersionReader
from worker.metrics.exposition import Series, counter, gauge
from worker.stream.decoding import Limits
from worker.stream.topology import Topics

log = logging.getLogger(__name__)


async def run_gateway(
    connection: Connection, topics: Topics, *, http: HttpSettings, limits: Limits, max_remembered_sessions: int
) -> None:
    """Serve until a signal. Raises `FailedError` if Kafka or the port cannot be used at the start."""
    transport = KafkaTransport(connection, topics)
    service = KafkaAdService(Exchange(transport, remember=max_remembered_sessions, seconds=60.0, others=True), limits)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Series(GATEWAY_CATALOGUE, lambda: service))
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    with stops_on_signals(lambda: loop.call_soon_threadsafe(stop.set)):
        await transport.start(service.exchange.receive)
        following = asyncio.create_task(VersionReader(connection, topics, service.take).run())
        try:
            async with http_server(service, http, registry=registry) as url:
                brokers = ",".join(connection.servers)
                message = "a gateway for topics %s.* on %s; requests, metrics and health at %s"
                log.info(message, topics.prefix, brokers, url, extra={"fields": {"url": url}})
                await stop.wait()
                log.info("the gateway ends")
        finally:
            following.cancel()
            await asyncio.wait([following])
            await transport.stop()


# ── metrics ──────────────────────────────────────────────────────────────────────────────────────────────────────────

GATEWAY_CATALOGUE: Final = (
    counter(
        "adcascade_gateway_records_total",
        "Records sent to Kafka.",
        lambda service: {"arrivals": service.exchange.counts.arrivals, "clicks": service.exchange.counts.feedback},
        topic=("arrivals", "clicks"),
    ),
    counter(
        "adcascade_gateway_waits_total",
        "Waits for a decision, by their end: it came, or it did not come in time.",
        lambda service: {"answered": service.exchange.counts.answered, "timed-out": service.exchange.counts.timed_out},
        end=("answered", "timed-out"),
    ),
    counter(
        "adcascade_gateway_late_decisions_total",
        "Decisions that came after the deadline of their request.",
        "exchange.counts.late",
    ),
    counter(
        "adcascade_gateway_late_feedback_total",
        "Feedback after the time of its session. The workers do not count it; --session-timeout can allow more time.",
        "late_feedback",
    ),
    counter(
        "adcascade_gateway_repeated_decisions_total",
        "Decisions that were known, or for an earlier position.",
        "exchange.counts.repeated",
    ),
    counter(
        "adcascade_gateway_undelivered_batches_total",
        "Records that no broker accepted in time.",
        "exchange.counts.undelivered",
    ),
    gauge(
        "adcascade_gateway_remembered_sessions", "Sessions that are remembered.", lambda service: len(service.exchange)
    ),
    gauge(
        "adcascade_gateway_connected",
        "1 while the brokers can be reached, else 0.",
        lambda service: service.exchange.transport.trouble is None,
    ),
    gauge(
        "adcascade_gateway_parameters_version",
        "Newest version of the parameters, -1 before the first.",
        "version",
    ),
)
