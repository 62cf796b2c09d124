"""The routes: requests for ads, by the seam `AdService`; pages beside them, such as /metrics and the status page.

Rules that hold in this file:

- Every request is answered. What is the client's mistake is answered 4xx, with problem details.
- Nothing is logged of a request: it may carry keys, tokens and contexts.
- With keys, everything needs one but the health checks, the description and the page to try it out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Literal, TypeAlias, TypeVar

from aiohttp import web
from aiohttp.web_protocol import RequestPayloadError

from worker.http.direct import DirectResponse, encoded, takes_direct, whole_answer
from worker.http.keys import ApiKeys, SessionQuota
from worker.http.metrics import HttpMetrics
from worker.http.plain import Plain, read_plain
from worker.http.problems import CONTENT_TYPE, ProblemError, problem_of
from worker.http.requests import read_arrive, read_batch, read_feedback, session_in_path
from worker.http.service import AdService, Answer, UnavailableError, UnknownSessionError
from worker.stream.decoding import Rejected
from worker.web.connections import Connection, ConnectionLimits, LimitedServer
from worker.web.server import Page, Route

log = logging.getLogger(__name__)

#: Paths of the routes for ads. The others are pages.
SESSIONS: Final = "/v1/sessions"
BATCH_SESSIONS: Final = "/v1/batch/sessions"
BATCH_FEEDBACK: Final = "/v1/batch/feedback"
#: A batch may be so many times as large as a single request.
BATCH_SIZE: Final = 16

_HEADERS: Final = {"Server": "adcascade", "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
_JSON: Final = {**_HEADERS, "Content-Type": "application/json"}
_ENCODED_JSON: Final = encoded(_JSON)
_PROBLEM: Final = {**_HEADERS, "Content-Type": CONTENT_TYPE}
_RETRY: Final = {"Retry-After": "1"}

_T = TypeVar("_T")
#: From the request and the name of its key to the answer.
Endpoint: TypeAlias = Callable[[web.BaseRequest, str], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiSettings:
    """The settings of the interface; `deadline` in seconds. Without keys, whoever can connect may send requests."""

    deadline: float = 0.05
    keys: ApiKeys | None = None
    max_sessions_per_key: int | None = None
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)


class HttpApi:
    """Answers requests.

    Parameters
    ----------
    service : what decides about ads
    pages : further routes, by path; those in `open_pages` need no key
    """

    def __init__(
        self,
        service: AdService,
        settings: ApiSettings,
        *,
        pages: Mapping[str, Route],
        open_pages: Sequence[str],
        metrics: HttpMetrics,
    ) -> None:
        self._service = service
        self._settings = settings
        self._pages = dict(pages)
        self._open_pages = frozenset(open_pages)
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._quota = SessionQuota(settings.max_sessions_per_key, self._loop.time)
        self._most = settings.connections.max_body_bytes
        self._exact: dict[str, tuple[str, Endpoint]] = {
            SESSIONS: ("arrive", self._arrive),
            BATCH_SESSIONS: ("batch-arrive", self._batch_arrive),
            BATCH_FEEDBACK: ("batch-feedback", self._batch_feedback),
        }
        self.server = LimitedServer(self.handle, settings.connections, self._take)
        metrics.connections = lambda: self.server.open_connections

    # ── every request ────────────────────────────────────────────────────────────────────────────────────────────────

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request."""
        connection: Connection = request.protocol  # type: ignore[assignment]
        began, route = self._loop.time(), "other"
        try:
            if connection.is_blocked:
                await connection.unblocked()
            path = request.raw_path.partition("?")[0]
            route, method, endpoint = self._route(path)
            key = self._key_of(request, path)
            if request.method != method and not (method == "GET" and request.method == "HEAD"):
                raise ProblemError("method", f"it takes {method}", {"Allow": method})
            response: web.StreamResponse = await endpoint(request, key)
        except Exception as error:
            response = _problem(_problem_in(error))
        finally:
            self.server.received(request)
        self._metrics.answered(route, response.status, self._loop.time() - began)
        return response

    def _take(self, connection: Connection, data: bytes) -> Literal["taken", "partial", "other"]:
        """Take a request that needs no aiohttp; its answer is written when it is there."""
        plain = read_plain(data, self._most)
        if not isinstance(plain, Plain):
            return plain
        if connection.is_blocked:
            return "other"
        began = self._loop.time()
        answering: asyncio.Future[Answer]
        try:
            answering = asyncio.ensure_future(self._ask(plain))
        except Exception as error:
            answering = self._loop.create_future()
            answering.set_exception(error)
        route = "arrive" if plain.session_id is None else "feedback"
        answering.add_done_callback(partial(self._finish, connection, route, began))
        return "taken"

    def _ask(self, plain: Plain) -> Awaitable[Answer]:
        keys = self._settings.keys
        key = "" if keys is None else keys.name_of(plain.authorization)
        if plain.session_id is not None:
            feedback = read_feedback(plain.body, self._most, plain.session_id)
            return self._service.feedback(feedback, self._deadline())
        arrival = read_arrive(plain.body, self._most)
        self._quota.take(key)
        return self._service.arrive(arrival, self._deadline())

    def _finish(self, connection: Connection, route: str, began: float, answering: asyncio.Future[Answer]) -> None:
        """Write the answer to a request that was taken."""
        try:
            answer = answering.result()
        except asyncio.CancelledError:  # the server ends
            connection.cut()
            return
        except Exception as error:
            problem = _problem_in(error)
            status, body = problem_of(problem)
            headers = encoded({**_PROBLEM, **_more_headers(problem)})
        else:
            self._metrics.fallbacks += answer.fallback
            status, headers, body = 200, _ENCODED_JSON, answer.body()
        connection.answer(whole_answer(status, headers, body))
        self._metrics.answered(route, status, self._loop.time() - began)

    def _route(self, path: str) -> tuple[str, str, Endpoint]:
        """Return the name of a route, its method and its function."""
        found = self._exact.get(path)
        if found is not None:
            return found[0], "POST", found[1]
        if path in self._pages:
            return "other", "GET", self._page
        if path.startswith(SESSIONS + "/"):
            name, _, rest = path[len(SESSIONS) + 1 :].partition("/")
            if name and rest == "feedback":
                return "feedback", "POST", self._feedback
            if name and not rest and not path.endswith("/"):
                return "session", "GET", self._session
        raise ProblemError("not-found", "see /v1/openapi.json")

    def _key_of(self, request: web.BaseRequest, path: str) -> str:
        keys = self._settings.keys
        if keys is None or path in self._open_pages:
            return ""
        return keys.name_of(request.headers.get("Authorization"))

    async def _body(self, request: web.BaseRequest, most: int) -> bytes:
        """Return the body; raise if it has more than so many bytes, before it is read if its length is known."""
        headers = request.headers
        if (origin := headers.get("Origin")) is not None and origin.partition("://")[2] != headers.get("Host"):
            # A browser sends whatever a page asks it to, with the password that it remembers.
            raise ProblemError("origin")
        if "Content-Encoding" in headers:
            raise ProblemError("encoding")
        length = request.content_length
        if length is not None and length > most:
            raise Rejected("too-large", f"the body has {length} bytes, more than {most}")
        if "Expect" in headers:
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        content = request.content
        body = await content.readany()
        while not content.at_eof():
            body += await content.readany()
            if len(body) > most:
                break
        if len(body) > most:
            raise Rejected("too-large", f"the body has more than {most} bytes")
        connection: Connection = request.protocol  # type: ignore[assignment]
        connection.received()
        return body

    # ── ads ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _arrive(self, request: web.BaseRequest, key: str) -> web.StreamResponse:
        asked = read_arrive(await self._body(request, self._most), self._most)
        self._quota.take(key)
        return self._answer(request, await self._service.arrive(asked, self._deadline()))

    async def _feedback(self, request: web.BaseRequest, key: str) -> web.StreamResponse:
        session_id = _session_of(request)
        asked = read_feedback(await self._body(request, self._most), self._most, session_id)
        return self._answer(request, await self._service.feedback(asked, self._deadline()))

    async def _session(self, request: web.BaseRequest, key: str) -> web.StreamResponse:
        session_id = _session_of(request)
        answer = await self._service.session(session_id)
        if answer is None:
            raise ProblemError("unknown-session")
        return self._answer(request, answer)

    async def _batch_arrive(self, request: web.BaseRequest, key: str) -> web.Response:
        most = BATCH_SIZE * self._most
        batch = read_batch(await self._body(request, most), most, read_arrive, self._most)
        self._quota.take(key, len(batch))
        return await self._batch(batch, self._service.arrive)

    async def _batch_feedback(self, request: web.BaseRequest, key: str) -> web.Response:
        most = BATCH_SIZE * self._most
        batch = read_batch(await self._body(request, most), most, read_feedback, self._most)
        return await self._batch(batch, self._service.feedback)

    async def _batch(
        self, batch: Sequence[_T | Rejected], ask: Callable[[_T, float], Awaitable[Answer]]
    ) -> web.Response:
        deadline = self._deadline()

        async def one(asked: _T | Rejected) -> bytes:
            try:
                if isinstance(asked, Rejected):
                    raise asked
                answer = await ask(asked, deadline)
            except Rejected as rejected:
                return problem_of(rejected)[1]
            except UnknownSessionError as error:
                return problem_of(ProblemError("unknown-session", str(error)))[1]
            self._metrics.fallbacks += answer.fallback
            return answer.body()

        answers = await asyncio.gather(*map(one, batch))
        return web.Response(body=b'{"answers":[%b]}' % b",".join(answers), headers=_JSON)

    def _deadline(self) -> float:
        return self._loop.time() + self._settings.deadline

    def _answer(self, request: web.BaseRequest, answer: Answer) -> web.StreamResponse:
        self._metrics.fallbacks += answer.fallback
        if takes_direct(request):
            return DirectResponse(answer.body(), _ENCODED_JSON)
        return web.Response(body=answer.body(), headers=_JSON)

    # ── pages ────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _page(self, request: web.BaseRequest, key: str) -> web.Response:
        route = self._pages[request.raw_path.partition("?")[0]]
        headers = {name.lower(): value for name, value in request.headers.items()}
        # In a thread: the figures of a large catalogue take a while.
        page: Page = await asyncio.to_thread(route, headers)
        response = web.Response(
            body=page.body, status=page.status, headers={**_HEADERS, "Content-Type": page.kind, **dict(page.headers)}
        )
        response.enable_compression()
        return response


def _session_of(request: web.BaseRequest) -> str:
    return session_in_path(request.raw_path.partition("?")[0][len(SESSIONS) + 1 :].partition("/")[0])


def _problem(error: Rejected | ProblemError) -> web.Response:
    status, body = problem_of(error)
    return web.Response(body=body, status=status, headers={**_PROBLEM, **_more_headers(error)})


def _more_headers(error: Rejected | ProblemError) -> dict[str, str]:
    return error.headers if isinstance(error, ProblemError) else {}


def _problem_in(error: Exception) -> Rejected | ProblemError:
    """Return what an error is to the client."""
    if isinstance(error, Rejected | ProblemError):
        return error
    if isinstance(error, UnknownSessionError):
        return ProblemError("unknown-session", str(error))
    if isinstance(error, UnavailableError):
        return ProblemError("unavailable", str(error), _RETRY)
    if isinstance(error, ConnectionError | RequestPayloadError):
        # The client has gone, or its body is not what its headers say.
        return ProblemError("unreadable", "the body does not come in as the headers say")
    log.error("a request failed", exc_info=error)
    return ProblemError("internal")
