"""A headless Chromium for tests, driven over the DevTools protocol.

Without Chromium the tests are skipped; under CI=true they fail.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from aiohttp import ClientSession, ClientWebSocketResponse, WSMsgType

from tests.programs import needs

SWITCHES = (
    "no-sandbox disable-gpu disable-quic disable-dev-shm-usage no-first-run no-default-browser-check hide-scrollbars "
    "disable-background-networking disable-component-update disable-sync disable-extensions"
)
FLAGS = (
    *(f"--{name}" for name in SWITCHES.split()),
    "--headless=new",
    "--disable-features=Translate,OptimizationHints,MediaRouter",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    "--remote-debugging-port=0",
)
TIMEOUT = 300.0


def chromium() -> str:
    return needs("chromium", "chromium-browser", "google-chrome", package="chromium")


class Tab:
    """One page; collect its console errors and network requests."""

    def __init__(self, socket: ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._reader = asyncio.get_running_loop().create_task(self._read())

    async def _read(self) -> None:
        async for message in self._socket:
            if message.type is not WSMsgType.TEXT:
                continue
            reply = json.loads(message.data)
            if "id" in reply:
                waiting = self._waiting.pop(reply["id"])
                if not waiting.done():
                    waiting.set_result(reply)
            else:
                self._note(reply["method"], reply["params"])

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"].get("exception", params["exceptionDetails"])))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.errors.append(str(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(str(params["entry"]))

    async def call(self, method: str, **params: Any) -> Any:
        number = next(self._numbers)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        async with asyncio.timeout(TIMEOUT):
            reply = await self._waiting[number]
        assert "error" not in reply, reply
        return reply["result"]

    async def open(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        for domain in ("Page", "Runtime", "Network", "Log", "Accessibility"):
            await self.call(f"{domain}.enable")
        await self.resize(width, height)
        await self.prefer(dark=dark)
        await self.call("Page.navigate", url=url)

    async def resize(self, width: int, height: int) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    async def prefer(self, *, dark: bool) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def look(self, script: str) -> Any:
        """Return the value of a JavaScript expression."""
        reply = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in reply, reply["exceptionDetails"]
        return reply["result"].get("value")

    async def text(self, element: str) -> Any:
        """Return the visible text of an element, by its id."""
        return await self.look(f"document.getElementById({element!r}).innerText")

    async def until(self, script: str, fits: Callable[[Any], bool] = bool) -> Any:
        """Wait until the value of an expression fits."""
        async with asyncio.timeout(TIMEOUT):
            while not fits(value := await self.look(script)):  # noqa: ASYNC110 (the condition is in another process)
                await asyncio.sleep(0.05)
        return value

    async def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=_CODES[key])

    async def close(self) -> None:
        await self._socket.close()
        await self._reader


_CODES = {"Tab": 9, "ArrowLeft": 37, "ArrowRight": 39, "Enter": 13}


@asynccontextmanager
async def browser_tab() -> AsyncIterator[Tab]:
    """Run a browser with a profile of its own, and yield its only tab."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            chromium(),
            *FLAGS,
            f"--user-data-dir={profile}",
            "about:blank",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            port = await _port(process)
            async with ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    pages = [page for page in await answer.json() if page["type"] == "page"]
                async with session.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    tab = Tab(socket)
                    try:
                        yield tab
                    finally:
                        await tab.close()
        finally:
            with suppress(ProcessLookupError):
                process.terminate()
            with suppress(TimeoutError):
                async with asyncio.timeout(120):
                    await process.communicate()
            if process.returncode is None:
                process.kill()
                await process.communicate()


async def _port(process: asyncio.subprocess.Process) -> int:
    assert process.stderr is not None
    output = b""
    async with asyncio.timeout(TIMEOUT):
        while line := await process.stderr.readline():
            output += line
            if found := re.search(rb"DevTools listening on ws://[^:]+:(\d+)/", line):
                return int(found[1])
    raise AssertionError(f"chromium ended: {output.decode(errors='replace')}")
