"""`adcascade serve` as a process, and a client that sends again whatever was not answered."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from tests.programs import free_port
from worker.runtime.process import command, environment

DIM, HORIZON = 2, 3
ARMS = {"hat": 1.0, "coat": 2.5, "shoe": 1.5, "scarf": 0.7}


class ServeProcess:
    """Starts the server on one port, again and again."""

    def __init__(self, folder: Path, *more: str) -> None:
        self.folder = folder
        self.state, self.log = folder / "state", folder / "served.log"
        catalogue = folder / "arms.json"
        catalogue.write_text(json.dumps(ARMS))
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        # In the folder where it runs there is another package of this name, as there may be in a user's.
        (folder / "worker.py").write_text("raise SystemExit('the wrong package')")
        self._command = [
            *(*command("worker", "serve"), "--dim", str(DIM), "--horizon", str(HORIZON)),
            *("--catalog", str(catalogue), "--state", str(self.state), "--port", str(self.port)),
            *("--record", str(self.log), "--log-format", "text", *more),
        ]
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def output(self) -> str:
        return (self.folder / "output").read_text(errors="replace")

    def start(self, largest: int | None = None) -> None:
        """Start it, perhaps with files of at most `largest` bytes: beyond that, writes fail as on a full disk."""
        limit = () if largest is None else ("prlimit", f"--fsize={largest}")
        with (self.folder / "output").open("ab") as output:
            self.process = subprocess.Popen(
                (*limit, *self._command),
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self.folder,
                start_new_session=True,
            )
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline:
            try:
                with socket.create_connection(("127.0.0.1", self.port), timeout=5):
                    return
            except OSError:
                assert self.process.poll() is None, self.output
                time.sleep(0.02)
        raise AssertionError(f"it does not start: {self.output}")

    def kill(self, *, everything: bool = False) -> None:
        """Kill the serving process, or it and its learner at once."""
        assert self.process is not None
        if everything:
            os.killpg(self.process.pid, signal.SIGKILL)
        else:
            self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """Let it end; return its exit code."""
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(300)

    def __enter__(self) -> ServeProcess:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process is not None and self.process.poll() is None:
            self.kill(everything=True)


@dataclass
class Seen:
    """What a client was told of a session: the position that is next, or that it has ended; and what it reported."""

    context: list[float]
    answered_at: float
    position: int = 1
    ended: str | None = None
    reported: list[tuple[int, str, bool]] = field(default_factory=list)


class Clients:
    """Users who go through their sessions, whatever happens to the server."""

    def __init__(self, url: str, seed: int = 1) -> None:
        self.url = url
        self.sessions: dict[str, Seen] = {}
        self.fallbacks = self.again = 0
        self.opened = asyncio.Condition()
        self._chance = random.Random(seed)
        self._running = True

    async def run(self, users: int, until: Any) -> None:
        """Let `users` users come one after the other until an awaitable is done."""
        timeout = aiohttp.ClientTimeout(total=30)
        async with aiohttp.ClientSession(timeout=timeout) as http, asyncio.TaskGroup() as tasks:
            for _ in range(users):
                tasks.create_task(self._users(http))
            await until
            self._running = False

    async def _users(self, http: aiohttp.ClientSession) -> None:
        while self._running:
            await self._session(http)

    async def _session(self, http: aiohttp.ClientSession) -> None:
        name = f"{self._chance.getrandbits(64):016x}"
        context = [round(self._chance.gauss(0, 1), 3) for _ in range(DIM)]
        answer = await self._ask(http, "/v1/sessions", {"session_id": name, "context": context})
        seen = self.sessions[name] = Seen(context, time.monotonic())
        async with self.opened:
            self.opened.notify_all()
        while "arm" in answer:
            seen.position = answer["position"]
            report = (answer["position"], answer["arm"], self._chance.random() < 0.3)
            body = dict(zip(("position", "arm", "clicked"), report, strict=True))
            answer = await self._ask(http, f"/v1/sessions/{name}/feedback", body)
            if answer is None:
                return  # it was over before the server came back
            seen.reported.append(report)
            seen.answered_at = time.monotonic()
        seen.ended = answer["ended"]

    async def _ask(self, http: aiohttp.ClientSession, path: str, body: Any) -> Any:
        """Return the answer to a request, sent again until there is one; None if the session is over."""
        while True:
            try:
                async with http.post(self.url + path, json=body) as response:
                    answer = await response.json(content_type=None)
                    if response.status == 200 and "fallback" not in answer:
                        return answer
                    if response.status == 404:
                        return None
                    assert response.status in (200, 503), (response.status, answer)
                    self.fallbacks += response.status == 200
            except aiohttp.ClientError:
                self.again += 1
            await asyncio.sleep(0.02)
