"""The yardstick: a plain aiohttp application that reads the body and answers a constant.

    python -m worker.bench.http.constant

It prints its URL.
"""

from __future__ import annotations

import asyncio
import sys

from aiohttp import web

ANSWER = (
    b'{"session_id":"00000000000000000000000000000000","arrived_at":1700000000000,"position":1,"arm":"ad-01","slate":'
    b'["ad-01","ad-07","ad-13","ad-29","ad-31"],"mode":"exploit","propensity":1.0,"parameters_version":7,'
    b'"value":0.7312345678901234}'
)


async def answer(request: web.Request) -> web.Response:
    """Answer any request."""
    await request.read()
    return web.Response(body=ANSWER, content_type="application/json")


async def main() -> None:
    """Serve until killed."""
    app = web.Application()
    app.router.add_post("/v1/sessions", answer)
    app.router.add_post("/v1/sessions/{session_id}/feedback", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    sys.stdout.write(f"http://127.0.0.1:{runner.addresses[0][1]}\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
