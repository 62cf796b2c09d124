"""What a client waits for while workers join and leave: three workers, 200 arrivals per second on 8 partitions.

A fourth worker joins, one leaves by SIGTERM, and one is killed, each under the same live traffic. For each of these
events the longest wait counts of all arrivals that were answered from the event to the next one. Everything is seen
from outside, by users who wait for each decision (`users`): from sending an arrival to reading its first decision.
"""

from __future__ import annotations

import asyncio
import signal
import tempfile
import time
import uuid
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError

from worker.bench.figures import Figure
from worker.bench.kafka.broker import running_broker
from worker.bench.kafka.live import serves
from worker.bench.kafka.processes import ChildProcess, worker_process
from worker.bench.kafka.recording import Recording, record
from worker.bench.kafka.topics import delete, prepare
from worker.bench.kafka.users import WaitingUsers
from worker.client.kafka import KafkaTransport
from worker.errors import FailedError
from worker.kafka.clients import admin_client, run_client
from worker.kafka.connection import Connection
from worker.stream.topology import Topics

PARTITIONS = 8
WORKERS = 3
ROUNDS = 3
SESSIONS = 3_000  # recorded, and played over and over
BEFORE = 300_000  # milliseconds between the recorded users and the run
PATIENCE = 60.0  # seconds for a group to form
LOOK = 0.1  # seconds between two looks at the group
SILENCE = 20.0  # seconds without a decision after which an arrival counts as unanswered


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Size of a run: rounds, arrivals per second, and the seconds before the first event and after each.

    `member_timeout` is the option of the workers, in seconds.
    """

    rounds: int = ROUNDS
    arrivals: float = 200.0
    calm: float = 4.0
    join: float = 9.0
    leave: float = 7.0
    kill: float = 20.0
    member_timeout: int = 10

    @property
    def seconds(self) -> float:
        """Length of the play."""
        return self.calm + self.join + self.leave + self.kill


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One round; times are nanoseconds of the monotonic clock.

    `sent` holds the time of each arrival, `answered` that of its first decision by the number of the arrival, `events`
    those of the events in their order.
    """

    sent: Sequence[int]
    answered: Mapping[int, int]
    events: Sequence[int]

    def longest(self) -> list[float]:
        """Return the longest wait in seconds before the first event, and from each event to the next one.

        A wait belongs to the last event before its decision. An arrival without a decision has waited until the last
        decision of the round.

        >>> sent, answered = [0, 10**9, 2 * 10**9], {0: 2 * 10**8, 1: 12 * 10**8}
        >>> Round(sent=sent, answered=answered, events=(5 * 10**8, 11 * 10**8)).longest()
        [0.2, 0.0, 0.2]
        """
        longest = [0.0] * (len(self.events) + 1)
        last = max(self.answered.values())
        for number, sent in enumerate(self.sent):
            ended = self.answered.get(number, last)
            part = bisect_right(self.events, ended)
            longest[part] = max(longest[part], (ended - sent) / 1e9)
        return longest

    def unanswered(self) -> int:
        """Return the number of arrivals without a decision."""
        return len(self.sent) - len(self.answered)


def measure(address: str | None, scale: Scale | None = None) -> Iterator[Figure | str]:
    """Yield the figures, and between them the step that follows."""
    scale = scale or Scale()
    yield "starting the broker"
    with running_broker(address) as connection, tempfile.TemporaryDirectory(prefix="adcascade-bench-") as folder:
        yield "recording the traffic"
        recording = record(SESSIONS, time.time_ns() // 1_000_000 - BEFORE)
        prefix = f"bench-{uuid.uuid4().hex[:8]}"
        rounds: list[Round] = []
        try:
            for turn in range(scale.rounds):
                yield f"workers join and leave, round {turn + 1} of {scale.rounds}"
                group = Group(connection, Topics(f"{prefix}-{turn}"), recording, Path(folder), scale)
                rounds.append(run_client(connection, group.play()))
        finally:
            run_client(connection, delete(connection, prefix))
        yield from figures(rounds, scale)


FIGURES = 5  # number of figures that `figures` yields


def figures(rounds: Sequence[Round], scale: Scale) -> Iterator[Figure]:
    """Yield the longest waits over all rounds, and the arrivals without a decision."""
    calm, *events = zip(*(one.longest() for one in rounds), strict=True)
    count = len(rounds[0].sent)
    detail = f"{WORKERS} workers, {scale.arrivals:g} arrivals/s"
    yield Figure("longest wait, nothing happens", max(calm), "s", detail=detail)
    details = (
        ("a fourth worker joins", 3.0, "from the start of its process on"),
        ("a worker leaves", 3.0, "SIGTERM"),
        ("a worker is killed", None, f"kill -9: the group waits for --member-timeout ({scale.member_timeout} s)"),
    )
    for (name, most, how), waits in zip(details, events, strict=True):
        seen = ", ".join(f"{wait:.2f}" for wait in waits)
        yield Figure(f"longest wait, {name}", max(waits), "s", most=most, detail=f"{how}; rounds: {seen}")
    detail = f"in {len(rounds)} rounds of {count:,} sessions"
    yield Figure("arrivals without a decision", sum(one.unanswered() for one in rounds), "", most=0, detail=detail)


class Group:
    """A consumer group of workers on topics of its own."""

    def __init__(self, connection: Connection, names: Topics, recording: Recording, folder: Path, scale: Scale) -> None:
        self._connection, self._names = connection, names
        self._recording, self._folder = recording, folder
        self._scale = scale

    async def play(self) -> Round:
        """Start the workers, then play the traffic and the events."""
        await prepare(self._connection, self._names, PARTITIONS, parameters=self._recording.parameters)
        with ExitStack() as stack:
            workers = [stack.enter_context(self._worker()) for _ in range(WORKERS)]
            survivor = workers[-1]
            await self._formed(workers)
            await serves(self._connection, self._names, survivor, self._recording, PARTITIONS)
            happening = asyncio.create_task(self._happen(stack, workers))
            try:
                users = WaitingUsers(KafkaTransport(self._connection, self._names), self._recording.scripts)
                await users.play(self._scale.arrivals, self._scale.seconds, SILENCE)
                return Round(sent=users.sent, answered=users.answered, events=await happening)
            finally:
                happening.cancel()

    def _worker(self) -> ChildProcess:
        timeout = f"{self._scale.member_timeout}s"
        return worker_process(self._connection.servers[0], self._names, self._folder, member_timeout=timeout)

    async def _happen(self, stack: ExitStack, workers: Sequence[ChildProcess]) -> tuple[int, ...]:
        """Let one worker join, one leave and one die; return when."""
        scale, times = self._scale, []
        await asyncio.sleep(scale.calm)
        times.append(time.monotonic_ns())
        stack.enter_context(self._worker())
        await asyncio.sleep(scale.join)
        times.append(time.monotonic_ns())
        workers[0].process.send_signal(signal.SIGTERM)
        await asyncio.sleep(scale.leave)
        times.append(time.monotonic_ns())
        workers[1].process.kill()
        return tuple(times)

    async def _formed(self, workers: Sequence[ChildProcess]) -> None:
        """Wait until all workers are members of a group that has assigned its partitions."""
        deadline = time.monotonic() + PATIENCE
        async with admin_client(self._connection) as admin:
            while await self._members(admin) < len(workers):
                for child in workers:
                    child.check()
                if time.monotonic() > deadline:
                    raise FailedError(f"the workers form no group: {workers[0].last_error()}")
                await asyncio.sleep(LOOK)

    async def _members(self, admin: AIOKafkaAdminClient) -> int:
        """Return the number of members, 0 while the group is not stable."""
        try:
            (answer,) = await admin.describe_consumer_groups([self._names.prefix])
        except KafkaError:
            return 0  # a new broker has no coordinator before the first group joins
        ((_, _, state, _, _, members, *_),) = answer.groups
        return len(members) if state == "Stable" else 0
