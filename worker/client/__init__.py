"""The client of the workers: arrivals and feedback out, decisions back, over Kafka, for asyncio.

Public names are those below; docs/clients.md documents them. No simulation, no HTTP and no Faust here. `Client` has
the interface, `Exchange` the rules of waiting and repeating, `KafkaTransport` the bytes.
"""

from worker.client.client import Client
from worker.client.decision import AdDecision, Origin
from worker.client.exchange import ClientCounts
from worker.client.transport import UndeliveredError
from worker.kafka.connection import Connection

__all__ = ["AdDecision", "Client", "ClientCounts", "Connection", "Origin", "UndeliveredError"]
