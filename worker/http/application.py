"""What all requests go through: the middleware, its checks, and the problems that errors are answered with.

Rules that hold in this file:

- Every request is answered. What is the client's mistake is answered 4xx, with problem details.
- Nothing is logged of a request: it may carry keys, tokens and contexts.
- With keys, everything needs one but the pages in `open_pages`. Without keys, a request names this machine, an address,
  or a name that the operator allows. So no website can reach the server through its own name (DNS rebinding).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import lru_cache, partial
from ipaddress import ip_address
from typing import Final, TypeAlias
from urllib.parse import urlsplit

from aiohttp import HttpVersion11, web

from worker.http.connections import HttpConnection
from worker.http.metrics import ROUTES, HttpMetrics
from worker.http.pages import Page, Route
from worker.http.problems import HEADERS, ProblemError, problem_response
from worker.http.service import UnavailableError, UnknownSessionError
from worker.http.settings import ApiKeys
from worker.stream.decoding import Rejected

log = logging.getLogger(__name__)

#: The name of the key of a request, if keys are needed.
KEY: Final = web.RequestKey("key", str)

_LEAST_COMPRESSED: Final = 1_000  # bytes

Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]


# ── the middleware ───────────────────────────────────────────────────────────────────────────────────────────────────


class Gatekeeper:
    """The middleware of all requests: decides whether they come in, and answers those that fail.

    Parameters
    ----------
    names : host names that requests may be for, besides this machine's; None for any
    keys : if there are any, the names do not matter
    """

    def __init__(
        self,
        names: Collection[str] | None,
        *,
        keys: ApiKeys | None = None,
        open_pages: Collection[str] = (),
        metrics: HttpMetrics | None = None,
    ) -> None:
        self._keys = keys
        self._open_pages = frozenset(open_pages)
        self._metrics = metrics
        allowed = None if names is None or keys is not None else frozenset(name.lower() for name in names)
        self._is_ours = lru_cache(maxsize=256)(lambda host: allowed is None or is_ours(host, allowed))

    @web.middleware
    async def handle(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer a request."""
        loop, connection = asyncio.get_running_loop(), request.protocol
        assert isinstance(connection, HttpConnection)
        began = loop.time()
        try:
            self._check(request)
            if request.body_exists:
                await request.read()
            connection.received()
            response = await handler(request)
        except Exception as error:
            response = problem_response(problem_in(error))
        finally:
            connection.answered()
        if self._metrics is not None:
            resource = request.match_info.route.resource
            name = None if resource is None else resource.name
            self._metrics.answered(name if name in ROUTES else "other", response.status, loop.time() - began)
        return response

    def _check(self, request: web.Request) -> None:
        headers = request.headers
        hosts = headers.getall("Host", ())
        if len(hosts) > 1 or (not hosts and request.version >= HttpVersion11):
            raise ProblemError("unreadable", "a request must have one header Host")
        if hosts and not self._is_ours(hosts[0]):
            raise ProblemError(
                "host", "without API keys, use localhost or an IP address, or start the server with --allow-host NAME"
            )
        origin = headers.get("Origin")
        if origin is not None and origin.partition("://")[2] != (hosts[0] if hosts else None):
            # A browser sends whatever a page asks it to, with the password that it remembers.
            raise ProblemError("origin")
        if self._keys is not None and request.path not in self._open_pages:
            request[KEY] = self._keys.name_of(headers.get("Authorization"))
        if "Content-Encoding" in headers:
            raise ProblemError("encoding")


def is_ours(host: str, names: Collection[str]) -> bool:
    """Return whether a header `Host` has a name of this machine, an address, or one of some names.

    >>> [is_ours(host, ()) for host in ("localhost:8080", "[::1]:8080", "10.0.0.5", "ads.example")]
    [True, True, True, False]
    """
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    if name == "localhost" or name.endswith(".localhost") or name in names:
        return True
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address to listen on."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def problem_in(error: Exception) -> ProblemError:
    """Return what an error is to the client."""
    match error:
        case ProblemError():
            return error
        case Rejected():
            return ProblemError(error.reason, error.error)
        case UnknownSessionError():
            return ProblemError("session-over" if error.over else "unknown-session", str(error))
        case UnavailableError():
            return ProblemError("unavailable", str(error), {"Retry-After": "1"})
        case web.HTTPNotFound():
            return ProblemError("not-found")  # a worker has pages only, and no description
        case web.HTTPMethodNotAllowed():
            methods = ", ".join(sorted(error.allowed_methods))
            return ProblemError("method", f"it takes {methods}", {"Allow": methods})
        case web.HTTPRequestEntityTooLarge():
            return ProblemError("too-large", "the body has too many bytes")
        case ConnectionError() | web.RequestPayloadError():
            # The client has gone, or its body is not what its headers say.
            return ProblemError("unreadable", "the body does not come in as the headers say")
    log.error("a request failed", exc_info=error)
    return ProblemError("internal")


# ── pages ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def add_pages(app: web.Application, pages: Mapping[str, Route]) -> None:
    """Add pages to an application."""
    for path, route in pages.items():
        app.router.add_get(path, partial(_page, route))


async def _page(route: Route, request: web.Request) -> web.StreamResponse:
    # In a thread: the figures of a large catalogue take a while, and health checks must not wait for them.
    page: Page = await asyncio.to_thread(route, request.headers)
    headers = {**HEADERS, "Content-Type": page.kind, **dict(page.headers)}
    response = web.Response(body=page.body, status=page.status, headers=headers)
    if len(page.body) >= _LEAST_COMPRESSED:
        response.enable_compression()
    return response
