"""Read the published parameters and send orders to the learner, over Kafka.

An order is a record at the end of the journal. The learner carries it out at that position; its answer is the version
that names this record's offset. The effect on the newest version is computed here first, by the learner's own rules: an
order that would be refused, or would change nothing, is reported at once and not written.
"""

from __future__ import annotations

import asyncio
import time

from worker.console import progress
from worker.errors import FailedError, InputError
from worker.kafka.clients import append, read_to_end, run_client, standalone_consumer
from worker.kafka.connection import Connection
from worker.kafka.parameters import decoded, published_versions
from worker.stream.catalogue import Refusal, change_arm, obey
from worker.stream.encoding import encode_journal
from worker.stream.events import ArmChange, Command
from worker.stream.parameters import Parameters
from worker.stream.topology import Topics

_PAUSE = 0.1  # seconds between two polls of the parameters


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

    def history(self) -> list[Parameters]:
        """Return the versions kept, oldest first."""
        versions = run_client(self._connection, published_versions(self._connection, self._names))
        if not versions:
            raise InputError(f"{self._names.parameters} holds no parameters yet: has a worker been started?")
        return versions

    def order(self, event: ArmChange | Command) -> Parameters:
        """Append the order to the journal and wait for the version that it makes."""
        history = self.history()
        newest = history[-1]
        outcome = _expected(newest, event, history)
        if isinstance(outcome, Refusal):
            raise FailedError(f"refused: {outcome.reason}")
        if outcome is None:
            return newest
        return run_client(self._connection, self._send(event, newest.version))

    async def _send(self, event: ArmChange | Command, known: int) -> Parameters:
        async with standalone_consumer(self._connection) as consumer:
            offset = await append(self._connection, self._names.journal, encode_journal(event))
            deadline = time.monotonic() + self._timeout
            start = 0
            versions: dict[int, Parameters] = {}
            with progress("waiting for the learner", None):
                while time.monotonic() < deadline:
                    records = await read_to_end(consumer, self._names.parameters, start)
                    start = records[-1].offset + 1 if records else start
                    versions |= {parameters.version: parameters for parameters in decoded(records)}
                    if (answer := _answer(versions, event, offset, known)) is not None:
                        return answer
                    await asyncio.sleep(_PAUSE)
        raise FailedError(
            f"no learner answered within {self._timeout:g} s; the order is in the journal (offset {offset}) and will "
            "be carried out when a learner runs. Is a worker running?"
        )


def _expected(newest: Parameters, event: ArmChange | Command, history: list[Parameters]) -> Parameters | Refusal | None:
    if isinstance(event, ArmChange):
        return change_arm(newest, event)
    return obey(newest, event, {parameters.version: parameters for parameters in history})


def _answer(versions: dict[int, Parameters], event: ArmChange | Command, offset: int, known: int) -> Parameters | None:
    """Return the version that the record at `offset` made; raise if the learner has passed it and made none."""
    for parameters in versions.values():
        if parameters.journal_offset == offset and parameters.version > known:
            return parameters
    newest = versions[max(versions)] if versions else None
    if newest is None or newest.journal_offset < offset:
        return None
    # Another order came in between. If its result is the wanted one, that is as good.
    outcome = _expected(newest, event, [versions[number] for number in sorted(versions)])
    if outcome is None:
        return newest
    raise FailedError(
        f"refused: {outcome.reason}"
        if isinstance(outcome, Refusal)
        else "another order came first; check the parameters and send this one again"
    )
