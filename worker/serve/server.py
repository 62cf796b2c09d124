"""`adcascade serve`, put together: the runner, the learner process, HTTP, orders, and what is watched."""

from __future__ import annotations

import asyncio
import logging
import signal
from contextlib import AsyncExitStack, suppress
from typing import Final

from worker.errors import AdcascadeError, FailedError
from worker.http.server import http_server
from worker.metrics.observer import Metrics
from worker.runtime.learner_process import LearnerProcess, LearnerStatus, count_report
from worker.runtime.process import collect_garbage_rarely, let_the_loop_go_first
from worker.serve.control import SOCKET, OrderDesk
from worker.serve.runner import ServeRunner
from worker.serve.state import StateFolder
from worker.serve.store import Lesson, ServeSettings, ServeStore, Version, check_not_moved, keep_first
from worker.stream.decoding import decode_episode
from worker.stream.parameters import Parameters, decode_parameters
from worker.stream.slates import prepared
from worker.stream.versions import Versions
from worker.web.status import status_routes

log = logging.getLogger(__name__)

#: Seconds for the learner to fold what was served, at the end.
_END_PATIENCE: Final = 10.0
#: Seconds between two checks of the balances and of the learner.
_WATCH_INTERVAL: Final = 2.0


def run_server(settings: ServeSettings) -> int:
    """Serve until SIGTERM or SIGINT; raise `FailedError` or `InputError` if that is not possible."""
    with StateFolder(settings.folder, keep=settings.keep) as state:
        check_not_moved(state)
        history = [decode_parameters(value) for value in state.parameters()]
        settings = settings.with_tagged(history, state.slots, state.load)
        first = settings.first_version(history)
        if not history:
            history = [first]
            keep_first(state, first)
        store = ServeStore(state, settings.record, keep=settings.keep_record)
        collect_garbage_rarely()
        let_the_loop_go_first()
        try:
            asyncio.run(Server(settings, store, history).run())
        finally:
            store.close()
    return 0


class Server:
    """The parts of a server."""

    def __init__(self, settings: ServeSettings, store: ServeStore, history: list[Parameters]) -> None:
        self._settings, self._store = settings, store
        self._metrics = Metrics()
        versions = Versions(history[0])
        for parameters in history[1:]:
            versions.learn(parameters)
        self._metrics.version(versions.newest)
        versions.at(settings.clock()).prepare()  # now, not in the first request
        self._runner = ServeRunner(store, versions, self._metrics, settings)
        self._desk = OrderDesk(self._runner)
        self._learner = LearnerProcess(settings.learner, self._on_status, self._metrics.troubles)

    async def run(self) -> None:
        """Serve until a signal; raise if a part fails for good."""
        settings, metrics, stop = self._settings, self._metrics, asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        pages = status_routes(metrics, runner="serve", unready=self._runner.ready, clock=settings.clock)
        async with AsyncExitStack() as stack:
            running = asyncio.create_task(self._runner.run())
            stack.push_async_callback(_cancel, running)
            self._learner.assign(True)
            stack.push_async_callback(self._learner.stop)
            stack.push_async_callback(self._wait_for_learner)
            orders = await self._desk.listen(settings.folder)
            stack.callback((settings.folder / SOCKET).unlink, missing_ok=True)
            stack.callback(orders.close)
            stack.push_async_callback(_cancel, asyncio.create_task(self._watch()))
            url = await stack.enter_async_context(
                http_server(
                    self._runner,
                    settings.http,
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
        """Let the learner fold all that was served, so that the log has what came of it."""
        if self._runner.failure is None:
            with suppress(TimeoutError):
                async with asyncio.timeout(_END_PATIENCE):
                    await self._desk.learned(self._store.journal_end)

    # ── the learner ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def _on_status(self, status: LearnerStatus) -> None:
        """Keep what was learned, then serve by it."""
        metrics = self._metrics
        count_report(metrics, status)
        refused = list(status.refused)
        if status.versions or status.episodes or status.tags:
            lesson = await asyncio.to_thread(decoded_lesson, status)  # a large version takes a while
            refused += await self._runner.keep(lesson)
            for version in lesson.versions:
                self._learn(version)
        self._desk.report(status.position, refused)

    def _learn(self, version: Version) -> None:
        versions, parameters = self._runner.versions, version.parameters
        try:
            is_new = versions.learn(parameters, version.planner)
        except AdcascadeError as error:
            self._metrics.count("refused_versions")
            log.error("version %d is refused: %s", parameters.version, error)
            return
        self._metrics.version(versions.newest)
        if is_new:
            log.info("parameters version %d (%s…)", parameters.version, parameters.sha256[:12])

    async def _watch(self) -> None:
        while True:
            self._metrics.census([self._runner.serving])
            self._learner.check()
            self._metrics.learning(self._learner.running)
            await asyncio.sleep(_WATCH_INTERVAL)


def decoded_lesson(status: LearnerStatus) -> Lesson:
    """Decode what the learner has made, and prepare its versions for serving."""
    versions = []
    for value in map(bytes, status.versions):
        parameters = decode_parameters(value)
        versions.append(Version(parameters, prepared(parameters), value))
    episodes = [(decode_episode(value), value) for value in map(bytes, status.episodes)]
    return Lesson(versions, episodes, status.tags)


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError, FailedError):
        await task
