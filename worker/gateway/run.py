"""A gateway from its settings to its end."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from worker.client.exchange import Exchange
from worker.client.kafka import KafkaTransport
from worker.gateway.metrics import GatewayMetrics
from worker.gateway.model import PublishedModel
from worker.gateway.service import KafkaAdService
from worker.http.server import http_server
from worker.http.settings import HttpSettings
from worker.kafka.clients import partition_counts
from worker.kafka.connection import Connection
from worker.stream.decoding import Limits
from worker.stream.parameters import Parameters
from worker.stream.topology import Topics

log = logging.getLogger(__name__)

_LONGER = 5.0  # seconds that a session is remembered beyond its end


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """The settings of a gateway."""

    connection: Connection
    topics: Topics
    http: HttpSettings
    limits: Limits
    max_in_flight: int
    max_remembered_sessions: int


def check_topics(settings: GatewaySettings) -> None:
    """Raise `FailedError` if no broker can be reached, or if a topic is missing."""
    topics = settings.topics
    partition_counts(settings.connection, topics.parameters, topics.arrivals, topics.clicks, topics.decisions)


async def run_gateway(settings: GatewaySettings, stop: asyncio.Event) -> None:
    """Serve until `stop` is set. Raises `FailedError` if Kafka or the port cannot be used at the start."""
    connection, topics = settings.connection, settings.topics
    exchange = Exchange(
        KafkaTransport(connection, topics),
        most_in_flight=settings.max_in_flight,
        remember=settings.max_remembered_sessions,
        seconds=60.0,
        others=True,
    )

    def adopt(parameters: Parameters) -> None:
        exchange.seconds = parameters.settings.grace / 1000 + _LONGER

    model = PublishedModel(connection, topics, adopt)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(GatewayMetrics(exchange, model))
    service = KafkaAdService(exchange, model, settings.limits)
    await exchange.start()
    try:
        async with (
            model.following(),
            http_server(service, settings.http, registry=registry) as url,
        ):
            brokers = ",".join(connection.servers)
            message = "a gateway for topics %s.* on %s; requests, metrics and health at %s"
            log.info(message, topics.prefix, brokers, url, extra={"fields": {"url": url}})
            await stop.wait()
            log.info("the gateway ends")
    finally:
        await exchange.transport.stop()
