"""The requests for ads: routes on the seam `AdService`, single and in batches."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from aiohttp import web

from worker.http.application import KEY, problem_in
from worker.http.connections import HEADERS, HttpConnection
from worker.http.metrics import HttpMetrics
from worker.http.problems import ProblemError, problem_of
from worker.http.requests import read_arrive, read_batch, read_feedback, session_in_path
from worker.http.service import AdRequest, AdService, Answer, UnavailableError, UnknownSessionError
from worker.http.settings import HttpSettings, SessionQuota
from worker.stream.decoding import Rejected

#: The largest batch, in bodies of the largest single request.
BATCH_SIZE: Final = 16

_JSON: Final = {**HEADERS, "Content-Type": "application/json"}


class HttpApi:
    """Answers requests with what a service decides."""

    def __init__(self, service: AdService, settings: HttpSettings, metrics: HttpMetrics) -> None:
        self._service = service
        self._deadline = settings.deadline
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._quota = SessionQuota(settings.max_sessions_per_key, self._loop.time)
        self._most = settings.max_body_bytes

    def add_to(self, app: web.Application) -> None:
        """Add the routes to an application."""
        session = "/v1/sessions/{session_id:[^/]+}"
        app.router.add_post("/v1/sessions", self._arrive, name="arrive")
        app.router.add_get(session, self._session, name="session")
        app.router.add_post(f"{session}/feedback", self._feedback, name="feedback")
        app.router.add_post("/v1/batch/sessions", self._batch_arrive, name="batch-arrive")
        app.router.add_post("/v1/batch/feedback", self._batch_feedback, name="batch-feedback")

    # ── single requests ──────────────────────────────────────────────────────────────────────────────────────────────

    async def _arrive(self, request: web.Request) -> web.Response:
        arrival = read_arrive(await _body(request, self._most), self._most)
        self._quota.take(request.get(KEY, ""))
        return self._answer(await self._service.arrive(arrival, self._loop.time() + self._deadline))

    async def _feedback(self, request: web.Request) -> web.Response:
        session_id = _session_of(request)
        feedback = read_feedback(await _body(request, self._most), self._most, session_id)
        return self._answer(await self._service.feedback(feedback, self._loop.time() + self._deadline))

    async def _session(self, request: web.Request) -> web.Response:
        answer = await self._service.session(_session_of(request))
        if answer is None:
            raise ProblemError("unknown-session")
        return self._answer(answer)

    def _answer(self, answer: Answer) -> web.Response:
        self._metrics.fallbacks += answer.fallback
        return web.Response(body=answer.body(), headers=_JSON)

    # ── batches ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _batch_arrive(self, request: web.Request) -> web.Response:
        most = BATCH_SIZE * self._most
        batch = read_batch(await _body(request, most), most, read_arrive, self._most)
        self._quota.take(request.get(KEY, ""), len(batch))
        return await self._batch(batch, self._service.arrive)

    async def _batch_feedback(self, request: web.Request) -> web.Response:
        most = BATCH_SIZE * self._most
        batch = read_batch(await _body(request, most), most, read_feedback, self._most)
        return await self._batch(batch, self._service.feedback)

    async def _batch(
        self, batch: Sequence[AdRequest | Rejected], ask: Callable[[AdRequest, float], Awaitable[Answer]]
    ) -> web.Response:
        """Answer each request of a batch in its place; if none could be taken at all, answer that."""
        deadline = self._loop.time() + self._deadline

        async def one(given: AdRequest | Rejected) -> Answer | Rejected | UnknownSessionError | UnavailableError:
            if isinstance(given, Rejected):
                return given
            try:
                return await ask(given, deadline)
            except (Rejected, UnknownSessionError, UnavailableError) as error:
                return error

        answers = await asyncio.gather(*map(one, batch))
        if answers and all(isinstance(answer, UnavailableError) for answer in answers):
            raise UnavailableError(str(answers[0]))
        self._metrics.fallbacks += sum(isinstance(answer, Answer) and answer.fallback for answer in answers)
        bodies = (one.body() if isinstance(one, Answer) else problem_of(problem_in(one))[1] for one in answers)
        return web.Response(body=b'{"answers":[%b]}' % b",".join(bodies), headers=_JSON)


async def _body(request: web.Request, most: int) -> bytes:
    """Return the body; raise if its headers say that it has more than `most` bytes."""
    if "Content-Encoding" in request.headers:
        raise ProblemError("encoding")
    length = request.content_length
    if length is not None and length > most:
        raise Rejected("too-large", f"the body has {length} bytes, more than {most}")
    body = await request.read()
    assert isinstance(request.protocol, HttpConnection)
    request.protocol.received()
    return body


def _session_of(request: web.Request) -> str:
    """Return the session id of the path `/v1/sessions/ID…`."""
    return session_in_path(request.rel_url.raw_path.split("/")[3])
