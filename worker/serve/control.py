"""Orders to a running `adcascade serve`: through a socket in its state folder. Versions are read from the folder.

A client sends an order as a line of JSON, as in the journal, and gets a line: the version after it, or what went wrong.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec

from worker.embedded.control import StateFolderControl
from worker.embedded.state import StateView
from worker.errors import AdcascadeError, FailedError, InputError
from worker.stream.decoding import Rejected, decode_journal
from worker.stream.encoding import encode_journal
from worker.stream.events import FeedbackFact, Opened, Order, Progress
from worker.stream.parameters import Parameters

SOCKET: Final = "control"
#: Bytes of the largest order: one with the record of a version.
LARGEST: Final = 64 << 20


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


async def take_orders(folder: Path, order: Callable[[Order], Awaitable[int]]) -> asyncio.Server:
    """Listen for orders; `order` executes one and returns the version after it. Only this user can connect."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            writer.write(msgspec.json.encode(await _reply(reader, order)) + b"\n")
            await writer.drain()
        except (OSError, ValueError):
            pass  # the client has gone, or has sent too much
        finally:
            writer.close()

    (folder / SOCKET).unlink(missing_ok=True)
    with _short_path(folder) as path:
        listening = socket.socket(socket.AF_UNIX)
        before = os.umask(0o177)
        try:
            listening.bind(path)
        finally:
            os.umask(before)
    return await asyncio.start_unix_server(serve, sock=listening, limit=LARGEST)


async def _reply(reader: asyncio.StreamReader, order: Callable[[Order], Awaitable[int]]) -> Reply:
    try:
        event = decode_journal((await reader.readline()).rstrip(b"\n"))
        if isinstance(event, Opened | FeedbackFact | Progress):
            return Reply(error="this is not an order")
        return Reply(version=await order(event))
    except Rejected as rejected:
        return Reply(error=f"the order cannot be read: {rejected.error}")
    except AdcascadeError as error:
        return Reply(error=str(error))


# ── a command ────────────────────────────────────────────────────────────────────────────────────────────────────────


class ServeControl(StateFolderControl):
    """Controls the learner of a running `adcascade serve`; `patience` is in seconds."""

    def __init__(self, folder: str, *, patience: float = 30.0) -> None:
        super().__init__(folder)
        self._patience = patience

    def order(self, event: Order) -> Parameters:
        """Send the order to the running process; return the version after it."""
        reply = self._ask(encode_journal(event))
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


def is_served(folder: str) -> bool:
    """Return whether a state folder belongs to `adcascade serve`, or did before it was taken to Kafka."""
    with suppress(InputError), StateView(folder) as state:
        return state.meta("runner") is not None
    return False
