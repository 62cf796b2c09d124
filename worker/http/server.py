"""The HTTP server of an `AdService`: the interface, its description, the page to try it out, metrics and health."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Final

from aiohttp import web
from prometheus_client import CollectorRegistry

from worker.errors import FailedError
from worker.http.api import ApiSettings, HttpApi
from worker.http.description import description_routes
from worker.http.metrics import HttpMetrics
from worker.http.service import AdService
from worker.web.connections import ConnectionLimits
from worker.web.server import Route, operations

#: File descriptors that are kept for everything but connections.
_RESERVED_FILES: Final = 128
#: Pages that need no key.
HEALTH: Final = ("/livez", "/readyz")


@asynccontextmanager
async def http_server(
    service: AdService,
    settings: ApiSettings,
    *,
    host: str,
    port: int,
    registry: CollectorRegistry,
    pages: Mapping[str, Route] | None = None,
    troubles: Callable[[], Sequence[str]] = tuple,
) -> AsyncIterator[str]:
    """Serve while the context is open; yield the URL. Port 0 is any free port.

    `registry` is what /metrics shows, beside the metrics of this server; `troubles` is what /readyz lists.
    """
    metrics = HttpMetrics()
    registry.register(metrics)
    described = description_routes()
    api = HttpApi(
        service,
        replace(settings, connections=_that_fit(settings.connections)),
        pages={**operations(registry, service.ready, troubles), **described, **(pages or {})},
        open_pages=(*HEALTH, *described),
        metrics=metrics,
    )
    runner = web.ServerRunner(api.server, handle_signals=False, shutdown_timeout=5.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port, backlog=1024)
        try:
            await site.start()
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise FailedError(f"cannot listen on {host}:{port}: {reason}; choose another port, or 0 for any") from None
        name = f"[{host}]" if ":" in host else host
        sweeping = asyncio.create_task(api.server.cut_slow_clients())
        try:
            yield f"http://{name}:{runner.addresses[0][1]}"
        finally:
            sweeping.cancel()
            with suppress(asyncio.CancelledError):
                await sweeping
    finally:
        await runner.cleanup()


def _that_fit(limits: ConnectionLimits) -> ConnectionLimits:
    """Return the limits with no more connections than this process may have files; ask the system for more first."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = limits.max_connections + _RESERVED_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return limits
    return replace(limits, max_connections=max(1, soft - _RESERVED_FILES))
