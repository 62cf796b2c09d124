"""The requests for ads: routes on the seam `AdService`, and bodies, to the records that they ask for.

A body is decoded twice: here only as far as it takes to make a record of it, then as that record, by the rules for
records. So there is one set of rules, and a context may take every form that an arrival's context may.

Other fields are ignored, unless one looks like a misspelling of a field that the request lacks: that is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final
from uuid import uuid4

from aiohttp import web
from msgspec import Raw, Struct

from worker.http.application import KEY
from worker.http.metrics import HttpMetrics
from worker.http.problems import HEADERS, ProblemError
from worker.http.service import AdRequest, AdService, Answer
from worker.http.settings import HttpSettings, SessionQuota
from worker.stream.decoding import Reader, Rejected, near_name

_JSON: Final = {**HEADERS, "Content-Type": "application/json"}


class HttpApi:
    """Answers requests with what a service decides."""

    def __init__(self, service: AdService, settings: HttpSettings, metrics: HttpMetrics) -> None:
        self._service = service
        self._deadline = settings.deadline
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._quota = SessionQuota(settings.max_sessions_per_key, self._loop.time)

    def add_to(self, app: web.Application) -> None:
        """Add the routes to an application."""
        session = "/v1/sessions/{session_id:[^/]+}"
        # The most frequent first: the router tries them one after the other.
        app.router.add_post(f"{session}/feedback", self._feedback, name="feedback")
        app.router.add_post("/v1/sessions", self._arrive, name="arrive")
        app.router.add_get(session, self._session, name="session")

    async def _arrive(self, request: web.Request) -> web.Response:
        arrival = read_arrive(await request.read())
        self._quota.take(request.get(KEY, ""))
        return self._answer(await self._service.arrive(arrival, self._loop.time() + self._deadline))

    async def _feedback(self, request: web.Request) -> web.Response:
        feedback = read_feedback(await request.read(), request.match_info["session_id"])
        return self._answer(await self._service.feedback(feedback, self._loop.time() + self._deadline))

    async def _session(self, request: web.Request) -> web.Response:
        answer = await self._service.session(request.match_info["session_id"])
        if answer is None:
            raise ProblemError("unknown-session")
        return self._answer(answer)

    def _answer(self, answer: Answer) -> web.Response:
        self._metrics.fallbacks += answer.fallback
        return web.Response(body=answer.body(), headers=_JSON)


# ── bodies ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class _Named(Struct):
    session_id: str | None


_read_members: Final = Reader[dict[str, Raw]](dict[str, Raw])
_read_name: Final = Reader[_Named](_Named)

_ARRIVE: Final = ("session_id", "occurred_at", "context", "exclude", "user_id")
_FEEDBACK: Final = ("occurred_at", "position", "arm", "clicked", "token")


def read_arrive(body: bytes) -> AdRequest:
    """Read the body of an arrival; one without a session id gets a new one."""
    sent = _members(body, _ARRIVE)
    name = _read_name(b'{"session_id":%b}' % sent.pop("session_id", b"null")).session_id
    return _request(uuid4().hex if name is None else name, sent)


def read_feedback(body: bytes, session_id: str) -> AdRequest:
    """Read the body of feedback for a session."""
    return _request(session_id, _members(body, _FEEDBACK))


def _members(body: bytes, fields: Sequence[str]) -> dict[str, bytes]:
    """Return those members of a body that are fields of the request."""
    given = _read_members(body)
    if unknown := [name for name in given if name not in fields]:
        for field in fields:
            if field not in given and (near := near_name(field, unknown)) is not None:
                raise Rejected("invalid", f"{near!r} is not a field of this request; did you mean {field}?")
    return {name: bytes(given[name]) for name in fields if name in given}


def _request(session_id: str, sent: dict[str, bytes]) -> AdRequest:
    time = sent.pop("occurred_at", b"null")
    members = b"".join(b',"%b":%b' % (name.encode(), value) for name, value in sent.items())
    return AdRequest(session_id, members, b"" if time == b"null" else time)
