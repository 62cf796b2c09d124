"""Pages: what is answered to GET requests on fixed paths. Metrics, health, the description of the interface, files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Final, TypeAlias

import orjson
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from worker import __version__

#: Paths that need no key.
HEALTH: Final = ("/livez", "/readyz")

POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
#: Headers of pages for browsers: they load nothing from elsewhere, and are shown nowhere else.
BROWSER_HEADERS: Final = (
    ("Content-Security-Policy", POLICY),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("X-Frame-Options", "DENY"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A response."""

    body: bytes
    kind: str = "text/plain; charset=utf-8"
    status: int = 200
    headers: tuple[tuple[str, str], ...] = ()


Route: TypeAlias = Callable[[Mapping[str, str]], Page]  # from the request headers, by any case of their names


def description_routes() -> dict[str, Route]:
    """Return the routes of the description, OpenAPI 3.1, and of the page to try the interface out."""
    described = Page(body=orjson.dumps(openapi()), kind="application/json", headers=BROWSER_HEADERS)
    return {
        "/v1/openapi.json": lambda _: described,
        "/v1/": page_of_file("worker.http", "try.html", "text/html; charset=utf-8"),
        "/v1/try.css": page_of_file("worker.http", "try.css", "text/css; charset=utf-8"),
        "/v1/try.js": page_of_file("worker.http", "try.js", "text/javascript; charset=utf-8"),
    }


def openapi() -> dict[str, Any]:
    """Return the description; tests compare it with the code."""
    described: dict[str, Any] = orjson.loads((files("worker.http") / "page" / "openapi.json").read_bytes())
    described["info"]["version"] = __version__
    return described


def page_of_file(package: str, name: str, kind: str) -> Route:
    """Return the route of a file in the folder `page` of a package."""
    page = Page(body=(files(package) / "page" / name).read_bytes(), kind=kind, headers=BROWSER_HEADERS)
    return lambda _: page


def operations(
    registry: CollectorRegistry,
    unready: Callable[[], str | None],
    troubles: Callable[[], Sequence[str]] = tuple,
) -> dict[str, Route]:
    """Return the routes for monitoring.

    `unready` returns the reason why the process is not ready, or None; `troubles` returns what else is wrong, which
    `/readyz` lists. `/livez` succeeds whenever the process answers: a restart would help with nothing else.
    """

    def metrics(headers: Mapping[str, str]) -> Page:
        encode, kind = choose_encoder(headers.get("Accept", ""))
        return Page(body=encode(registry), kind=kind)

    def ready(_: Mapping[str, str]) -> Page:
        reason, wrong = unready(), troubles()
        state = f"not ready: {reason}" if reason is not None else "ready, but there is trouble:" if wrong else "ready"
        lines = [state, *(f"- {text}" for text in wrong)]
        return Page(body="".join(f"{line}\n" for line in lines).encode(), status=200 if reason is None else 503)

    return {"/metrics": metrics, "/livez": lambda _: Page(body=b"alive\n"), "/readyz": ready}
