"""Orders for a state folder, and its versions, which are read from the folder also while it is served.

A running `adcascade serve` takes orders through a socket in its folder. A command sends an order as a line of JSON, as
in the journal, and gets a line: the version after it, or what went wrong.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from worker.errors import AdcascadeError, FailedError, InputError
from worker.serve.runner import ServeRunner
from worker.serve.state import StateView
from worker.stream.decoding import Rejected, decode_journal
from worker.stream.events import FeedbackFact, Opened, Order, Progress, encode_event
from worker.stream.history import KeptVersion
from worker.stream.parameters import Parameters, decode_parameters

SOCKET: Final = "control"
#: Bytes of the largest order: one with the record of a version.
LARGEST: Final = 64 << 20
#: Refusals that are kept for whoever gave the order.
_MOST_REFUSED: Final = 100


class Reply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The reply to an order: the version after it, or an error."""

    version: int = -1
    error: str = ""


@contextmanager
def _short_path(folder: Path) -> Iterator[str]:
    """Yield a path of the socket that is short enough for the system, however long that of the folder is."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{opened}/{SOCKET}"
    finally:
        os.close(opened)


# ── the running process ──────────────────────────────────────────────────────────────────────────────────────────────


class OrderDesk:
    """Gives orders to the learner, and waits for what becomes of them; `patience` is in seconds."""

    patience = 30.0

    def __init__(self, runner: ServeRunner) -> None:
        self._runner = runner
        self._position = -1
        self._reported = asyncio.Event()  # set for a moment: whoever waits then goes on
        self._refused: dict[int, str] = {}  # by offset in the journal, the last ones

    async def order(self, order: Order) -> int:
        """Write an order to the journal; return the version after it. Raises `FailedError` if it is refused."""
        offset = await self._runner.order(order)
        try:
            async with asyncio.timeout(self.patience):
                await self.learned(offset + 1)
        except TimeoutError:
            raise FailedError(
                f"the learner has not answered within {self.patience:g} s; the order is in the journal and will be "
                "carried out. What does /readyz say?"
            ) from None
        if (reason := self._refused.pop(offset, None)) is not None:
            raise FailedError(f"refused: {reason}")
        return self._runner.versions.newest.version

    async def learned(self, position: int) -> None:
        """Wait until the learner has folded the journal up to an offset, and what it made is kept."""
        while self._position < position:
            await self._reported.wait()

    def report(self, position: int, refused: Iterable[tuple[int, str]]) -> None:
        """Note how far the learner has come, and the orders that were refused."""
        self._refused.update(refused)
        while len(self._refused) > _MOST_REFUSED:
            del self._refused[next(iter(self._refused))]
        self._position = position
        self._reported.set()
        self._reported.clear()

    async def listen(self, folder: Path) -> asyncio.Server:
        """Take orders through the socket of a folder. Only this user can connect."""
        (folder / SOCKET).unlink(missing_ok=True)
        with _short_path(folder) as path:
            server = await asyncio.start_unix_server(self._serve, path, limit=LARGEST, start_serving=False)
        (folder / SOCKET).chmod(0o600)
        await server.start_serving()
        return server

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            writer.write(msgspec.json.encode(await self._reply(await reader.readline())) + b"\n")
            await writer.drain()
        except (OSError, ValueError):
            pass  # the client has gone, or has sent too much
        finally:
            writer.close()

    async def _reply(self, line: bytes) -> Reply:
        try:
            event = decode_journal(line.rstrip(b"\n"))
            if isinstance(event, Opened | FeedbackFact | Progress):
                return Reply(error="this is not an order")
            return Reply(version=await self.order(event))
        except Rejected as rejected:
            return Reply(error=f"the order cannot be read: {rejected.error}")
        except AdcascadeError as error:
            return Reply(error=str(error))


# ── a command ────────────────────────────────────────────────────────────────────────────────────────────────────────


class StateFolderControl:
    """Reads the versions of a state folder, and gives orders to its learner; `patience` is in seconds."""

    def __init__(self, folder: str, *, patience: float = 30.0) -> None:
        self.folder = folder
        self._patience = patience

    def history(self) -> list[Parameters]:
        """Return the versions kept, oldest first."""
        with StateView(self.folder) as state:
            versions = [decode_parameters(value) for value in state.parameters()]
        if not versions:
            raise InputError(f"{self.folder} holds no parameters yet")
        return versions

    def slots(self) -> dict[str, KeptVersion]:
        """Return the versions in the history, by slot."""
        with StateView(self.folder) as state:
            return state.slots()

    def load(self, slot: str) -> Parameters | None:
        """Return the version in a slot of the history."""
        with StateView(self.folder) as state:
            return state.load(slot)

    def order(self, event: Order) -> Parameters:
        """Execute an order and return the version after it; raise `FailedError` if the learner refuses it."""
        reply = self._ask(encode_event(event))
        if reply.error:
            raise FailedError(reply.error)
        newest = self.history()
        return next((one for one in newest if one.version == reply.version), newest[-1])

    def _ask(self, order: bytes) -> Reply:
        with socket.socket(socket.AF_UNIX) as connection, _short_path(Path(self.folder)) as path:
            connection.settimeout(self._patience + 5.0)
            try:
                connection.connect(path)
            except OSError:
                raise FailedError(
                    f"{self.folder} belongs to `adcascade serve`, which does not run: start it, then give the order"
                ) from None
            try:
                connection.sendall(order + b"\n")
                with connection.makefile("rb") as answer:
                    return msgspec.json.decode(answer.readline(), type=Reply)
            except (OSError, msgspec.DecodeError):
                raise FailedError("`adcascade serve` has not answered; see `adcascade arms list`") from None
