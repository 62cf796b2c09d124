"""Read the published parameters and send orders to the learner, over Kafka.

An order is a record at the end of the journal. The learner carries it out at that position; its answer is the version
that names this record's offset. The effect on the newest version is computed here first, by the learner's own rules: an
order that would be refused, or would change nothing, is reported immediately and not written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

from worker.console import progress
from worker.errors import FailedError, InputError
from worker.kafka.clients import (
    REQUEST_TIMEOUT,
    TopicReader,
    durable_producer,
    partition_counts,
    readable_errors,
    write,
)
from worker.kafka.connection import Connection
from worker.kafka.history import HistoryReader
from worker.kafka.parameters import decoded, published_versions
from worker.stream.catalogue import Refusal, carry_out
from worker.stream.events import Order, Tag, encode_event
from worker.stream.history import KeptVersion, tags
from worker.stream.parameters import Parameters
from worker.stream.topology import Topics
from worker.stream.version_sizes import VERSION_BYTES

_PAUSE = 0.1  # seconds between two polls of the parameters
_OVERHEAD = 1024  # bytes of a batch in addition to its only record, generously


class KafkaControl:
    """Controls the workers of a set of topics.

    Parameters
    ----------
    timeout : seconds to wait for the learner's answer
    """

    def __init__(self, connection: Connection, names: Topics, *, timeout: float = 30.0) -> None:
        self._connection = connection
        self._names = names
        self._timeout = timeout
        self._older = HistoryReader(names.parameters_history)

    def history(self) -> list[Parameters]:
        """Return the versions kept, oldest first."""
        versions = published_versions(self._connection, self._names)
        if not versions:
            raise InputError(f"{self._names.parameters} holds no parameters yet: has a worker been started?")
        return versions

    def slots(self) -> dict[str, KeptVersion]:
        """Return the versions in the history, by slot."""
        with self._history():
            return self._older.slots

    def load(self, slot: str) -> Parameters | None:
        """Return the version in a slot of the history."""
        with self._history() as reader:
            return self._older.find(slot, reader)

    @contextmanager
    def _history(self) -> Iterator[TopicReader]:
        partition_counts(self._connection, self._names.parameters_history)
        with readable_errors(self._connection), TopicReader(self._connection) as reader:
            self._older.refresh(reader)
            yield reader

    def order(self, event: Order) -> Parameters:
        """Append the order to the journal and wait for the version that it makes, or for its tag in the history."""
        history = self.history()
        newest = history[-1]
        if isinstance(event, Tag):
            with self._history() as reader:
                return self._answered(event, lambda _: self._tagged(event, newest, reader))
        versions = {parameters.version: parameters for parameters in history}
        outcome = carry_out(newest, event, versions)
        if isinstance(outcome, Refusal):
            raise FailedError(f"refused: {outcome.reason}")
        if outcome is None:
            return newest
        start = 0
        with readable_errors(self._connection), TopicReader(self._connection) as reader:

            def look(offset: int) -> Parameters | None:
                nonlocal start
                records = reader.read_to_end(self._names.parameters, start)
                start = records[-1].offset + 1 if records else start
                versions.update({parameters.version: parameters for parameters in decoded(records)})
                return _answer(versions, event, offset, newest.version)

            return self._answered(event, look)

    def _tagged(self, tag: Tag, newest: Parameters, reader: TopicReader) -> Parameters | None:
        self._older.refresh(reader)
        return newest if tags(self._older.slots).get(tag.name) == tag.version else None

    def _answered(self, event: Order, look: Callable[[int], Parameters | None]) -> Parameters:
        """Append an order; return what `look`, called with its offset, finds within the timeout."""
        value = encode_event(event)
        if len(value) > VERSION_BYTES - _OVERHEAD:
            raise InputError(f"the order has {len(value):,} bytes, more than {self._names.journal} takes")
        with closing(durable_producer(self._connection, message_timeout_ms=int(1000 * REQUEST_TIMEOUT))) as producer:
            offset = write(producer, self._names.journal, value).offset()
        deadline = time.monotonic() + self._timeout
        with progress("waiting for the learner"):
            while time.monotonic() < deadline:
                if (answer := look(offset)) is not None:
                    return answer
                time.sleep(_PAUSE)
        raise FailedError(
            f"no learner answered within {self._timeout:g} s; the order is in the journal (offset {offset}), and the "
            "next learner there carries it out or refuses it. Is a worker running, and what does its /readyz say?"
        )


def _answer(versions: dict[int, Parameters], event: Order, offset: int, known: int) -> Parameters | None:
    """Return the version that the record at `offset` made; raise if the learner has passed it and made none."""
    for parameters in versions.values():
        if parameters.journal_offset == offset and parameters.version > known:
            return parameters
    newest = versions[max(versions)]
    if newest.journal_offset < offset:
        return None
    # Another order came in between. If its result is the wanted one, that is as good.
    outcome = carry_out(newest, event, versions)
    if outcome is None:
        return newest
    raise FailedError(
        f"refused: {outcome.reason}"
        if isinstance(outcome, Refusal)
        else "another order came first; check the parameters and send this one again"
    )
