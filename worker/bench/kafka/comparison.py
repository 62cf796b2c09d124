"""The worker on a real broker against raw aiokafka and an idiomatic Faust agent, in one run with the same records.

(a) raw aiokafka, which reads, decodes, encodes and writes as much, without state; (b) a plain Faust agent with a table
write and a send per event; (c) `adcascade worker`, its learner included. First each works off a backlog, several times
in turn; then each serves live traffic at half of that rate.

The highest live rate of (c) is measured too. It is lower than on a backlog: there a worker skips decisions that later
feedback has overtaken, and live the broker and the clients need the same few processors.

Everything is counted from outside, by end offsets and by the kernel, so in the same way for all three. A first round,
in which the broker warms up, does not count.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
from aiokafka import TopicPartition

from worker.bench.figures import Figure
from worker.bench.kafka import open_sessions, rates
from worker.bench.kafka.baselines import BaselineTask
from worker.bench.kafka.broker import running_broker
from worker.bench.kafka.live import LONG, WARM, Latency, LiveRun, TooSlowError, live, play_live, serves
from worker.bench.kafka.processes import ChildProcess
from worker.bench.kafka.recording import LATENESS, TIMEOUT, WINDOW, Recording, record
from worker.bench.kafka.topics import Usage, delete, end_offsets, fill, inputs, partitions, prepare
from worker.bench.stream import HORIZON
from worker.errors import FailedError
from worker.kafka.clients import run_client
from worker.kafka.connection import Connection
from worker.stream.topology import Topics

FIGURES = 18 + rates.FIGURES  # number of figures that `measure` yields
BEFORE = 300_000  # milliseconds between the users of the backlog and the run
MOST_LIVE = 150_000.0  # events/s of the sender
LIVE_SESSIONS = 3_000  # recorded if only live traffic is measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Size of a run: sessions of the backlog (about 5.4 events each), rounds, seconds of live traffic.

    `partitions` holds for every topic that can have more than one, `rounds` for everything but the backlog and the
    rates that clients see. Of the seconds of these rates, a share is played.
    """

    partitions: int
    sessions: int = 56_000
    agent_sessions: int = 1_500
    backlog_rounds: int = 5
    rounds: int = 3
    rising_seconds: float = 10.0
    live_seconds: float = 7.0
    open_sessions: int = 100_000
    rate_rounds: int = rates.ROUNDS
    rate_share: float = 1.0


#: Output records per arrival and per click, on average.
Shares = tuple[float, float]


def measure(address: str | None, scale: Scale) -> Iterator[Figure | str]:
    """Yield the figures, and between them the step that follows."""
    yield "starting the broker"
    with running_broker(address) as connection, tempfile.TemporaryDirectory(prefix="adcascade-bench-") as folder:
        yield "recording the traffic"
        recording = record(scale.sessions, time.time_ns() // 1_000_000 - BEFORE)
        run = Comparison(connection, Path(folder), recording, scale)
        try:
            yield from run.backlog()
            yield from run.full_table()
            yield from run.live()
        finally:
            run.delete_topics()
        yield from _as_clients_see_it(connection, Path(folder), recording, scale)


def measure_latency(address: str | None, scale: Scale) -> Iterator[Figure | str]:
    """Yield only the figures of live traffic as a client sees it."""
    yield "starting the broker"
    with running_broker(address) as connection, tempfile.TemporaryDirectory(prefix="adcascade-bench-") as folder:
        yield "recording the traffic"
        recording = record(LIVE_SESSIONS, time.time_ns() // 1_000_000 - BEFORE)
        yield from _as_clients_see_it(connection, Path(folder), recording, scale)


def _as_clients_see_it(
    connection: Connection, folder: Path, recording: Recording, scale: Scale
) -> Iterator[Figure | str]:
    run = Comparison(connection, folder, recording, replace(scale, partitions=rates.PARTITIONS))
    try:
        yield from rates.measure_rates(run.play_rates, scale.rate_rounds)
    finally:
        run.delete_topics()


def worker_process(address: str, names: Topics, folder: Path) -> ChildProcess:
    """Start the worker that is measured."""
    # Arms and dimension come from the published version.
    options = {
        "broker": address,
        "prefix": names.prefix,
        "group": names.prefix,
        "horizon": HORIZON,
        "window": f"{WINDOW}ms",
        "session-timeout": f"{TIMEOUT}ms",
        "lateness": f"{LATENESS}ms",
        "log-level": "warning",
    }
    flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    return ChildProcess("the worker", ["worker", "worker", *flags], folder)


class Comparison:
    """One run; every variant has topics of its own, all under one prefix."""

    def __init__(self, connection: Connection, folder: Path, recording: Recording, scale: Scale) -> None:
        self._address = connection.servers[0]
        self._connection = connection
        self._folder = folder
        self._recording = recording
        self._scale = scale
        self._prefix = f"bench-{uuid.uuid4().hex[:8]}"
        self._made = 0
        self._usages: dict[str, list[Usage]] = {"raw": [], "wire": [], "agent": [], "worker": []}

    def delete_topics(self) -> None:
        """Delete all topics of the run."""
        run_client(self._connection, delete(self._connection, self._prefix))

    def _names(self) -> Topics:
        self._made += 1
        return Topics(f"{self._prefix}-{self._made}")

    def _all(self, topic: str) -> list[TopicPartition]:
        return partitions(topic, self._scale.partitions)

    async def _created(self, names: Topics, recording: Recording | None = None) -> None:
        await prepare(self._connection, names, self._scale.partitions, recording=recording)

    # ── the three ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _worker(self, names: Topics) -> ChildProcess:
        return worker_process(self._address, names, self._folder)

    def _baseline(self, kind: str, read: Topics, written: Topics, changes: Shares, decisions: Shares) -> ChildProcess:
        task = BaselineTask(
            kind=kind,
            broker=self._address,
            inputs=read.prefix,
            outputs=written.prefix,
            partitions=self._scale.partitions,
            sizes=self._recording.sizes,
            changes=changes,
            decisions=decisions,
            state=self._recording.states[0],
        )
        name = {"raw": "raw aiokafka", "wire": "the wire", "agent": "the Faust agent"}[kind]
        return ChildProcess(name, ["worker.bench.kafka.baselines", msgspec.json.encode(task).decode()], self._folder)

    # ── a backlog ────────────────────────────────────────────────────────────────────────────────────────────────────

    def backlog(self) -> Iterator[Figure | str]:
        """Measure each of the three on records that are all there already."""
        scale = self._scale
        yield "backlog, for the broker to warm up"
        self._once()
        for usages in self._usages.values():
            usages.clear()
        for turn in range(scale.backlog_rounds):
            yield f"backlog, round {turn + 1} of {scale.backlog_rounds}"
            self._once()
        for kind, name in _NAMES.items():
            usages = self._usages[kind]
            rates = sorted(usage.rate for usage in usages)
            detail = f"backlog, {rates[0]:,.0f} to {rates[-1]:,.0f} in {len(rates)} runs of {usages[0].events:,} events"
            yield Figure(name, self._rate(kind), "events/s", detail=detail)
            cost = statistics.median(usage.cost for usage in usages)
            whose = "of the worker and of its learner" if kind == "worker" else "of the process"
            yield Figure(f"{name}, processor", cost, "µs/event", detail=whose)
        yield Figure("(a) without the codec", self._rate("wire"), "events/s", detail="bytes in, other bytes out")
        yield self._against("agent", "(c) / (b)", least=20)
        yield self._against("raw", "(c) / (a)", least=0.5)

    def _against(self, kind: str, name: str, *, least: float) -> Figure:
        """Compare (c) with a baseline round by round: the machine may be faster in one round than in the next."""
        pairs = zip(self._usages["worker"], self._usages[kind], strict=True)
        ratios = sorted(worker.rate / other.rate for worker, other in pairs)
        detail = f"in events/s, {ratios[0]:.3g} to {ratios[-1]:.3g} in {len(ratios)} rounds"
        return Figure(name, statistics.median(ratios), "×", least=least, detail=detail)

    def _once(self) -> None:
        names, connection = self._names(), self._connection
        run_client(connection, self._prepared(names, self._recording))
        changes, decisions = run_client(connection, self._worker_on_backlog(names))
        for kind in ("raw", "wire"):
            run_client(connection, self._raw_on_backlog(kind, names, changes, decisions))
        run_client(connection, self._agent_on_backlog())

    def _rate(self, kind: str) -> float:
        return statistics.median(usage.rate for usage in self._usages[kind])

    async def _prepared(self, names: Topics, recording: Recording) -> None:
        await self._created(names, recording)
        await fill(self._connection, inputs(names, recording, self._scale.partitions))

    async def _worker_on_backlog(self, names: Topics) -> tuple[float, float]:
        """Return the table changes and the decisions per event."""
        events = self._recording.events
        async with end_offsets(self._connection) as look:
            with self._worker(names) as child:
                # A partition writes its progress when everything before it is acknowledged: its last record here.
                facts = events + self._scale.partitions
                self._usages["worker"].append(await look.usage(partitions(names.journal, 1), facts, child))
            changes = await look.count(self._all(names.changelog))
            decisions = await look.count(self._all(names.decisions))
            dead = await look.count(partitions(names.dead_letters, 1))
        if dead:
            raise FailedError(f"the worker wrote {dead} dead letters for {events} records: no measurement")
        return changes / events, decisions / events

    async def _raw_on_backlog(self, kind: str, names: Topics, changes: float, decisions: float) -> None:
        events, written = self._recording.events, self._names()
        await self._created(written)
        async with end_offsets(self._connection) as look:
            with self._baseline(kind, names, written, (changes, changes), (decisions, decisions)) as child:
                journal = partitions(written.journal, 1)
                self._usages[kind].append(await look.usage(journal, events, child))

    async def _agent_on_backlog(self) -> None:
        recording, names = self._recording.first(self._scale.agent_sessions), self._names()
        await self._prepared(names, recording)
        async with end_offsets(self._connection) as look:
            with self._baseline("agent", names, names, _EACH, _EACH) as child:
                decisions = self._all(names.decisions)
                self._usages["agent"].append(await look.usage(decisions, recording.events, child))

    # ── a full table ─────────────────────────────────────────────────────────────────────────────────────────────────

    def full_table(self) -> Iterator[Figure | str]:
        """Measure a start with many open sessions, then a backlog in which every event has to be answered."""
        count = self._scale.open_sessions
        seen: list[tuple[float, Usage]] = []
        for turn in range(self._scale.rounds):
            yield f"{count:,} open sessions, round {turn + 1} of {self._scale.rounds}"
            seen.append(run_client(self._connection, self._recovery(count)))
        rate, events = statistics.median(usage.rate for _, usage in seen), seen[0][1].events
        detail = f"backlog of {events:,}, each about another session; {rate / self._rate('agent'):.1f} × (b)"
        yield Figure("(c), every event answered", rate, "events/s", detail=detail)
        yield Figure(
            f"recovery of {count:,} open sessions",
            statistics.median(seconds for seconds, _ in seen),
            "s",
            most=15,
            detail="from the start of the process to the first decision",
        )

    async def _recovery(self, count: int) -> tuple[float, Usage]:
        names, now = self._names(), time.time_ns() // 1_000_000
        await self._created(names, self._recording)
        parts = open_sessions.backlog(self._recording, names, count, now, partitions=self._scale.partitions)
        await fill(self._connection, parts)
        events = sum(len(pairs) for (topic, _), pairs in parts.items() if topic in names.inputs)
        async with end_offsets(self._connection) as look:
            began = time.monotonic()
            with self._worker(names) as child:
                (answered, _), usage = await asyncio.gather(
                    look.reached(self._all(names.decisions), 1, child),
                    look.usage(partitions(names.journal, 1), events, child),
                )
                await look.reached(self._all(names.decisions), events, child)
        return answered - began, usage

    # ── live ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def live(self) -> Iterator[Figure | str]:
        """Measure the wait of a client at half of each one's rate; for (a) also at half of the rate of (c).

        Then measure the highest live rate of (c), and the wait at half of that.
        """
        half = {kind: min(MOST_LIVE, self._rate(kind) / 2) for kind in _NAMES}
        seen: dict[str, list[Latency]] = {"raw": [], "agent": [], "worker": [], "raw at (c)'s": []}
        for turn in range(self._scale.rounds):
            yield f"live, round {turn + 1} of {self._scale.rounds}"
            seen["worker"].append(self._latency("worker", half["worker"]))
            seen["raw at (c)'s"].append(self._latency("raw", half["worker"]))
        for kind in ("raw", "agent"):
            yield f"live, {_NAMES[kind]}"
            seen[kind].append(self._latency(kind, half[kind]))
        for kind, name in _NAMES.items():
            yield _wait(f"{name}, live", seen[kind], most=25 if kind == "worker" else None)
        same = seen["raw at (c)'s"]
        yield _wait(f"{_NAMES['raw']} at the rate of (c)", same)
        worker, wire = (_quantile(latencies, 0.99) for latencies in (seen["worker"], same))
        yield Figure(
            "(c) / (a), live p99",
            worker / wire,
            "×",
            most=5,
            detail=f"{worker:.1f} and {wire:.1f} ms, both at half of the rate of (c)",
        )
        yield from self._highest_rate()

    def _highest_rate(self) -> Iterator[Figure | str]:
        name = _NAMES["worker"]
        yield f"live, rising: {name}"
        most = min(MOST_LIVE, self._rate("worker"))
        highest = self._live("worker", (most / 50, most), self._scale.rising_seconds).highest_rate()
        if not highest:
            raise FailedError(f"{name} does not keep up with live traffic at any rate")
        detail = f"highest rate before half of the clients wait for more than {LONG:g} ms"
        yield Figure("(c), taken live", highest, "events/s", detail=detail)
        yield f"live, half of the highest rate: {name}"
        yield _wait("(c), at half of that", [self._latency("worker", highest / 2)])

    def _latency(self, kind: str, rate: float) -> Latency:
        return self._live(kind, (rate, rate), WARM + self._scale.live_seconds).latency()

    def _live(self, kind: str, rates: tuple[float, float], seconds: float) -> LiveRun:
        return run_client(self._connection, self._serve_live(kind, rates, seconds))

    def play_rates(self, kind: str, played: Sequence[rates.Rate]) -> list[LiveRun | None]:
        """Start one of the three and play all rates, one after the other; None from the first that is too high on."""
        return run_client(self._connection, self._play_rates(kind, played))

    async def _play_rates(self, kind: str, played: Sequence[rates.Rate]) -> list[LiveRun | None]:
        names, count = self._names(), self._scale.partitions
        await self._created(names, self._recording)
        runs: list[LiveRun | None] = [None] * len(played)
        with self._child(kind, names) as child:
            await serves(self._connection, names, child, self._recording, count)
            with suppress(TooSlowError):
                for number, rate in enumerate(played):
                    run = await play_live(
                        *(self._connection, names, child, self._recording, (rate.arrivals, rate.arrivals)),
                        *(rates.WARM + rate.seconds * self._scale.rate_share, self._folder, count),
                        tick=rate.tick,
                        name=f"live-{number}-",
                    )
                    if not rates.keeps_up(run):
                        break  # it would begin the next rate with a backlog
                    runs[number] = run
        return runs

    def _child(self, kind: str, names: Topics) -> ChildProcess:
        if kind == "worker":
            return self._worker(names)
        return self._baseline(kind, names, names, _EACH, (1.0, self._recording.decisions_per_click))

    async def _serve_live(self, kind: str, rates: tuple[float, float], seconds: float) -> LiveRun:
        names = self._names()
        await self._created(names, self._recording)
        with self._child(kind, names) as child:
            return await live(
                self._connection, names, child, self._recording, rates, seconds, self._folder, self._scale.partitions
            )


_NAMES = {"raw": "(a) raw aiokafka", "agent": "(b) idiomatic Faust agent", "worker": "(c) adcascade worker"}

_EACH: Shares = (1.0, 1.0)


def _quantile(latencies: Sequence[Latency], share: float) -> float:
    return float(np.quantile(np.concatenate([latency.waits for latency in latencies]), share))


def _wait(name: str, latencies: Sequence[Latency], most: float | None = None) -> Figure:
    rate = statistics.median(latency.rate for latency in latencies)
    high = _quantile(latencies, 0.99)
    runs = f", {len(latencies)} runs" if len(latencies) > 1 else ""
    detail = f"p50 from arrival to decision at {rate:,.0f} events/s; p99 {high:.1f} ms{runs}"
    return Figure(name, _quantile(latencies, 0.5), "ms", most=most, detail=detail)
