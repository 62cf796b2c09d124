"""Problem details (RFC 9457): the same reasons as dead letters, and those that only HTTP has."""

from __future__ import annotations

from typing import Final, NamedTuple

import orjson
from aiohttp import web

#: Headers of every answer.
HEADERS: Final = {"Server": "adcascade", "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
_HEADERS: Final = {**HEADERS, "Content-Type": "application/problem+json"}


class Problem(NamedTuple):
    """A kind of problem: its status and its title."""

    status: int
    title: str


#: By reason. Those of records come first; see `docs/reference.md`.
PROBLEMS: Final = {
    "unreadable": Problem(400, "The request cannot be read."),
    "undecodable": Problem(400, "The body is not JSON."),
    "invalid": Problem(400, "A field is missing or has a wrong value."),
    "too-large": Problem(413, "The request is too large."),
    "dimension": Problem(400, "The context has the wrong number of features."),
    "norm": Problem(400, "The context is too long a vector."),
    "future": Problem(400, "The time is in the future."),
    "past": Problem(400, "The time is too long ago."),
    "position": Problem(400, "There is no such position."),
    "unknown-arm": Problem(400, "There is no such arm."),
    "arm-mismatch": Problem(409, "Another arm was shown at this position."),
    "token": Problem(403, "The token is missing or belongs to another display."),
    "session-reused": Problem(409, "Another arrival has this session id."),
    "parked-overflow": Problem(429, "Too much feedback waits for the arrival of this session."),
    "unknown-session": Problem(404, "There is no such session, or it is over."),
    "session-over": Problem(410, "The session is over, and its feedback no longer counts."),
    "not-found": Problem(404, "There is no such page."),
    "method": Problem(405, "This page does not take such a request."),
    "encoding": Problem(415, "Bodies must not be compressed."),
    "host": Problem(403, "This server is not reached by that name."),
    "origin": Problem(403, "A page of another website has sent this request."),
    "unauthorized": Problem(401, "A valid API key is missing."),
    "too-many-sessions": Problem(429, "This key has opened as many sessions as it may for now."),
    "unavailable": Problem(503, "No requests can be taken at present."),
    "internal": Problem(500, "The server has failed to handle this request."),
}


class ProblemError(Exception):
    """An answer that is a problem; `headers` go with it."""

    def __init__(self, reason: str, detail: str = "", headers: dict[str, str] | None = None) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail
        self.headers = headers or {}


def problem_response(error: ProblemError) -> web.Response:
    """Return the answer to a request that cannot be served."""
    status, title = PROBLEMS[error.reason]
    document = {"type": f"urn:adcascade:{error.reason}", "title": title, "status": status, "reason": error.reason}
    if error.detail:
        document["detail"] = error.detail
    return web.Response(body=orjson.dumps(document), status=status, headers={**_HEADERS, **error.headers})
