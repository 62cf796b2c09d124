"""Looking at the parameters and giving orders to the learner, over Kafka.

An order is a record at the end of the journal. The learner acts on it where it stands; its answer is the version that
names this record's offset. What an order would do to the newest version is computed here beforehand, by the learner's
own rules: so one that would be refused, or would change nothing, is told at once and written nowhere.
"""

from __future__ import annotations

import asyncio
import time

from worker.console import progress
from worker.errors import FailedError, InputError, ParametersError
from worker.kafka.clients import admin_client, append, partitions_of, read_to_end, run_client, standalone_consumer
from worker.kafka.connection import Connection
from worker.stream.catalogue import Refusal, change_arm, obey
from worker.stream.codec import encode_journal
from worker.stream.events import ArmChange, Command
from worker.stream.parameters import Parameters, decode_parameters
from worker.stream.topology import Record, Topics
from worker.stream.versions import KEPT

_PAUSE = 0.1  # seconds between two looks at the parameters


class KafkaControl:
    """The topics of running workers.

    Parameters
    ----------
    patience : seconds to wait for the learner's answer
    """

    def __init__(self, connection: Connection, names: Topics, *, patience: float = 30.0) -> None:
        self._connection = connection
        self._names = names
        self._patience = patience

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
        outcome = _foreseen(newest, event, history)
        if isinstance(outcome, Refusal):
            raise FailedError(f"refused: {outcome.reason}")
        if outcome is None:
            return newest
        return run_client(self._connection, self._give(event, newest.version))

    async def _give(self, event: ArmChange | Command, known: int) -> Parameters:
        async with standalone_consumer(self._connection) as consumer:
            offset = await append(self._connection, self._names.journal, encode_journal(event))
            deadline = time.monotonic() + self._patience
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
            f"no learner answered within {self._patience:g} s; the order stands in the journal (offset {offset}) and "
            "will be carried out when a worker learns. Is one running?"
        )


def _foreseen(newest: Parameters, event: ArmChange | Command, history: list[Parameters]) -> Parameters | Refusal | None:
    if isinstance(event, ArmChange):
        return change_arm(newest, event)
    return obey(newest, event, {parameters.version: parameters for parameters in history})


def _answer(versions: dict[int, Parameters], event: ArmChange | Command, offset: int, known: int) -> Parameters | None:
    """Return the version that the record at `offset` made; raise if the learner is past it and made none."""
    for parameters in versions.values():
        if parameters.journal_offset == offset and parameters.version > known:
            return parameters
    newest = versions[max(versions)] if versions else None
    if newest is None or newest.journal_offset < offset:
        return None
    # Something else was ordered in the meantime. If all is as wanted now, that is as good.
    outcome = _foreseen(newest, event, [versions[number] for number in sorted(versions)])
    if outcome is None:
        return newest
    raise FailedError(
        f"refused: {outcome.reason}"
        if isinstance(outcome, Refusal)
        else "the order was overtaken by another one; look at the parameters and give it again"
    )


async def published_versions(connection: Connection, names: Topics) -> list[Parameters]:
    """Return the last versions of the parameters topic, oldest first; none if there are none."""
    async with admin_client(connection) as admin:
        if not await partitions_of(admin, [names.parameters]):
            raise FailedError(f"no topic {names.parameters}: create it first (adcascade topics create)")
    async with standalone_consumer(connection) as consumer:
        return newest_of(decoded(await read_to_end(consumer, names.parameters)))


def decoded(records: list[Record]) -> list[Parameters]:
    """Return the versions that can be read; workers count and log the others."""
    versions = []
    for record in records:
        if record.value is not None:
            try:
                versions.append(decode_parameters(record.value))
            except ParametersError:
                continue
    return versions


def newest_of(versions: list[Parameters]) -> list[Parameters]:
    """Return the last versions by number, each as it was published first, from its newest position."""
    kept: dict[int, Parameters] = {}
    for parameters in versions:
        known = kept.get(parameters.version)
        if known is None or (known.sha256 == parameters.sha256 and known.journal_offset < parameters.journal_offset):
            kept[parameters.version] = parameters
    newest = max(kept, default=0)
    return [kept[number] for number in sorted(kept) if number > newest - KEPT]
