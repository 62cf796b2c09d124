"""A Faust transport driver on librdkafka. The scheme of the broker's URL selects it.

Faust keeps recovery, flow and commits; librdkafka keeps the group. The driver differs from Faust's own in these points:

- A message is a whole poll, the records of all input partitions together (`Poll`). Faust makes two tasks per message.
  Each changelog partition has a separate message, since recovery counts offsets by partition.
- Polls are acknowledged by their delivery reports (`Flights`), not by the end of an iteration of the agent, which also
  comes with an exception. Faust's topics have ``acks=False``, and `force_commit` commits what is acknowledged.
- Outputs are written with explicit partitions by `Writer`; `send` of topics and tables is not implemented.
- The journal is assigned and never read: its owner runs the learner.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast

import confluent_kafka
from faust.serializers.schemas import Schema
from faust.transport import base
from faust.transport.drivers import TRANSPORTS
from faust.types import TP
from faust.types.assignor import HostToPartitionMap, PartitionAssignorT
from mode import Service
from yarl import URL

from worker.kafka.clients import durable_producer
from worker.kafka.consumer import Consumer
from worker.kafka.polls import Writer

if TYPE_CHECKING:
    from worker.kafka.app import WorkerApp

#: The scheme of broker addresses that selects this driver.
SCHEME: Final = "librdkafka"
TRANSPORTS.aliases[SCHEME] = f"{__name__}:Transport"

#: Seconds after which a write that no broker acknowledges fails the worker.
_WRITE_TIMEOUT: Final = 120.0


class Assignor(PartitionAssignorT):
    """Tells Faust what librdkafka has assigned; Faust's own assignor talks to aiokafka."""

    def __init__(self, app: Any, replicas: int = 0) -> None:
        self.app, self.replicas = app, replicas

    def group_for_topic(self, topic: str) -> int:
        """Return the group of a topic, for transactions."""
        return 0

    def assigned_actives(self) -> set[TP]:
        """Return the assigned partitions."""
        return self.app.consumer.assignment()

    def assigned_standbys(self) -> set[TP]:
        """Return none: the changelog is read in a second."""
        return set()

    def is_active(self, tp: TP) -> bool:
        """Return whether a partition is assigned."""
        return tp in self.assigned_actives()

    def is_standby(self, tp: TP) -> bool:
        """Return whether a partition is a standby."""
        return False

    def key_store(self, topic: str, key: bytes) -> URL:
        """Return the worker with a key, for Faust's web views."""
        return URL()

    def table_metadata(self, topic: str) -> HostToPartitionMap:
        """Return the workers of a table, for Faust's web views."""
        return {}

    def tables_metadata(self) -> HostToPartitionMap:
        """Return the workers of all tables, for Faust's web views."""
        return {}


class PollSchema(Schema):  # type: ignore[type-arg]
    """Passes polls through: nothing is decoded here, so nothing can fail here.

    A decode error inside Faust would ack the message, that is lose the poll.
    """

    def compile(self, app: Any, **_: Any) -> Any:
        """Return Faust's decode function."""
        create_event = app.create_event

        async def decode(message: Any, *, propagate: bool = False) -> Any:
            return create_event(None, message.value, None, message)

        return decode


class Fetcher(Service):
    """Hands what is polled to Faust. Its own fetcher spends four tasks on each message."""

    def __init__(self, app: WorkerApp, **kwargs: Any) -> None:
        self.app = app
        super().__init__(**kwargs)

    @Service.task
    async def fetch(self) -> None:
        """Deliver one message after the other until stopped."""
        consumer = cast(Consumer, self.app.consumer)
        while not self.should_stop:
            for message in await consumer.next_messages():
                if message.generation_id == self.app.consumer_generation_id and consumer.flow_active:
                    await consumer.deliver(message)


class Producer(base.Producer):
    """Faust's side of the producer; records are written by its `writer`."""

    app: WorkerApp

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        connection, timeout = self.app.settings.connection, int(1000 * _WRITE_TIMEOUT)
        self.librdkafka = durable_producer(connection, message_timeout_ms=timeout)
        self.writer = Writer(self.librdkafka)

    async def flush(self) -> None:
        """Do nothing: `Consumer.wait_empty` waits for what is in flight."""

    async def on_stop(self) -> None:
        """Give up what no broker has taken by now: it is not committed, and is read again."""
        self.librdkafka.purge()


class Transport(base.Transport):
    """The driver that Faust selects by the scheme."""

    Consumer = Consumer
    Producer = Producer
    Fetcher = Fetcher
    driver_version = f"confluent-kafka={confluent_kafka.version()}"
