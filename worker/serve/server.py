"""`adcascade serve`, put together: the runner, the learner process, HTTP, orders, and what is watched."""

from __future__ import annotations

import asyncio
import logging
import signal
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from typing import Final

from worker.embedded.state import FolderLock, StateFolder
from worker.embedded.steps import remaining
from worker.errors import FailedError, InputError
from worker.http.server import http_server
from worker.metrics import Metrics
from worker.runtime.learner_process import LearnerProcess, LearnerStatus
from worker.runtime.memory import (
    available_memory,
    collect_garbage_rarely,
    let_the_loop_go_first,
    sessions_that_fit,
)
from worker.runtime.watch import CatalogueCheck, different
from worker.serve.control import SOCKET, take_orders
from worker.serve.learner import MOVED, POSITION, RUNNER, SERVE, STEPS
from worker.serve.runner import RunnerStart, ServeRunner
from worker.serve.service import EmbeddedService, OrderDesk
from worker.serve.settings import ServeSettings, dimension
from worker.serve.versions import StoredVersions
from worker.stream.decoding import decode_episode
from worker.stream.parameters import Parameters
from worker.stream.sizes import check_size
from worker.stream.version_decoding import decode_parameters
from worker.stream.version_encoding import encode_parameters
from worker.stream.versions import KEPT, Versions
from worker.web.status import status_routes

log = logging.getLogger(__name__)

#: Seconds to wait for the processes of a server that was killed.
_LOCK_PATIENCE: Final = 5.0
#: Seconds for the learner to keep what was served, at the end.
_END_PATIENCE: Final = 10.0
#: Seconds between two checks of the accounts and of the learner.
_WATCH_INTERVAL: Final = 2.0


def run_server(settings: ServeSettings) -> int:
    """Serve until SIGTERM or SIGINT; raise `FailedError` or `InputError` if that is not possible."""
    lock = FolderLock(settings.folder, wait=_LOCK_PATIENCE)
    try:
        history, start = _read_folder(settings, lock)
        collect_garbage_rarely()
        let_the_loop_go_first()
        asyncio.run(_serve(settings, lock, history, start))
    finally:
        lock.release()
    return 0


def _read_folder(settings: ServeSettings, lock: FolderLock) -> tuple[list[Parameters], RunnerStart]:
    """Read what the last process left: what the learner has kept, and the steps after it."""
    with StateFolder(settings.folder, lock=_Borrowed(lock)) as state:
        history = [decode_parameters(value) for value in state.parameters()]
        if state.meta(RUNNER) == MOVED:
            raise InputError(f"{settings.folder} was taken to Kafka (adcascade topics import), and goes on there")
        if history and state.meta(RUNNER) != SERVE:
            raise InputError(f"{settings.folder} does not hold the state of `adcascade serve`; choose another folder")
        if not history:
            history = [_first_version(settings, state)]
        sessions = dict(state.sessions())
        _, journal_end = state.journal_bounds()
        topics = settings.topics
        offsets = {
            topic: int(state.meta(f"offset.{topic}") or b"0")
            for topic in (topics.arrivals, topics.clicks, topics.decisions, topics.dead_letters)
        }
        position = int(state.meta(POSITION) or b"0")
        time = progress = int(state.meta("time") or b"0")
    for step in remaining(settings.folder / STEPS, position):
        for key, value in step.sessions:
            if value is None:
                sessions.pop(key, None)
            else:
                sessions[key] = value
        journal_end = step.journal_start + len(step.journal)
        offsets.update(step.offsets)
        time, progress = max(time, step.time), step.progress or progress
    return history, RunnerStart(
        sessions=sessions, journal_end=journal_end, offsets=offsets, time=time, progress=progress, position=position
    )


def _first_version(settings: ServeSettings, state: StateFolder) -> Parameters:
    """Make version 0 and keep it, so that there is an answer before the learner process runs."""
    learning = replace(settings.learning, dim=dimension(settings.dim, None))
    first = Parameters.first(learning, settings.arms)
    check_size(first.arms, first.model)
    state.set_meta(RUNNER, SERVE)
    state.put_parameters(first.version, encode_parameters(first), kept=KEPT, needed=0)
    state.commit()
    return first


class _Borrowed(FolderLock):
    """A lock that somebody else holds and releases."""

    def __init__(self, lock: FolderLock) -> None:
        self.file = lock.file

    def release(self) -> None:
        """Leave it."""


async def _serve(settings: ServeSettings, lock: FolderLock, history: list[Parameters], start: RunnerStart) -> None:
    server = Server(settings, lock, history, start)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    await server.run(stop)


class Server:
    """The parts of a server."""

    def __init__(
        self, settings: ServeSettings, lock: FolderLock, history: list[Parameters], start: RunnerStart
    ) -> None:
        self._settings = settings
        dim = dimension(settings.dim, history[-1])
        self._metrics = Metrics()
        versions = Versions(history[0])
        self._versions = StoredVersions(settings.folder, versions, self._metrics)
        for parameters in history[1:]:
            versions.learn(parameters)
        self._metrics.version(versions.newest)
        versions.at(settings.clock()).prepare()  # now, not in the first request
        self._catalogue = CatalogueCheck(settings.arms, self._metrics.troubles)
        self._catalogue.start(versions.newest)
        if changed := different(replace(settings.learning, dim=dim), versions.newest.settings):
            log.warning(
                "other settings than those of version %d, from the next one on: %s",
                versions.newest.version,
                ", ".join(changed),
            )
        if not versions.newest.arms:
            log.warning(
                "there are no arms: every decision will be empty until `adcascade arms add` (or --catalog FILE)"
            )
        horizon = versions.newest.settings.horizon
        most = settings.max_open_sessions or sessions_that_fit(dim, horizon, available_memory())
        self._runner = ServeRunner(
            settings.folder / STEPS,
            versions,
            start,
            self._metrics,
            clock=settings.clock,
            topics=settings.topics,
            limits=settings.limits,
            secret=settings.secret,
            max_open_sessions=most,
            record=settings.record is not None,
            progress_interval=settings.progress_interval,
            sync=settings.sync,
        )
        self._desk = OrderDesk(self._runner, self._versions.load)
        self._kept = start.position
        self._reported = asyncio.Event()
        self._learner = LearnerProcess(
            (*settings.learner, str(lock.file)), self._on_status, self._metrics.troubles, files=(lock.file,)
        )
        self._service = EmbeddedService(self._runner, settings.limits, secret=settings.secret)

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set; raise if a part fails for good."""
        settings, metrics = self._settings, self._metrics
        pages = status_routes(metrics, runner="serve", unready=self._service.ready, clock=settings.clock)
        async with AsyncExitStack() as stack:
            self._learner.assign(True)
            stack.push_async_callback(self._learner.stop)
            stack.push_async_callback(self._wait_for_learner)
            running = asyncio.create_task(self._runner.run())
            stack.push_async_callback(_cancel, running)
            orders = await take_orders(settings.folder, self._desk.order)
            stack.callback((settings.folder / SOCKET).unlink, missing_ok=True)
            stack.callback(orders.close)
            stack.push_async_callback(_cancel, asyncio.create_task(self._watch()))
            url = await stack.enter_async_context(
                http_server(
                    self._service,
                    settings.api,
                    host=settings.host,
                    port=settings.port,
                    registry=metrics.registry,
                    pages=pages,
                    troubles=metrics.trouble_lines,
                )
            )
            log.info("serve: %s, try it out at %s/v1/", url, url, extra={"fields": {"url": url}})
            stopping = asyncio.create_task(stop.wait())
            await asyncio.wait((stopping, running), return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
        if running.done() and not running.cancelled():
            running.result()  # raises
        log.info("serve: stopped")

    async def _wait_for_learner(self) -> None:
        """Let the learner keep all that was served, and the log have it."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_END_PATIENCE):
                while self._kept < self._runner.writer.position:
                    self._reported.clear()
                    await self._reported.wait()

    # ── the learner ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _on_status(self, status: LearnerStatus) -> None:
        metrics = self._metrics
        if status.late:
            metrics.late(status.late)
        for kind, times, example in status.troubles:
            metrics.troubles.add(kind, example, times)
        for episode in status.episodes:
            metrics.episode(decode_episode(bytes(episode)))
        if status.watermark:
            metrics.watermark(status.watermark)
        if status.kept >= 0:
            self._kept = status.kept
            self._reported.set()
            self._runner.writer.delete_before(status.kept)
            self._versions.load_soon(status.version)
            self._desk.on_status(status)

    async def _watch(self) -> None:
        serving = self._runner.serving
        while True:
            wrong = self._metrics.census(open_sessions=serving.open_sessions, parked=serving.parked)
            if wrong:
                log.error("the accounts do not balance: %s", dict(wrong))
            self._learner.check()
            self._catalogue.again(self._runner.versions.history)
            self._metrics.learning(self._learner.running)
            await asyncio.sleep(_WATCH_INTERVAL)


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError, FailedError):
        await task
