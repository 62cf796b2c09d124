"""The settings of the HTTP server; its API keys, and the sessions that each key may open.

Keys are in a file, compared in constant time and never shown. A line is ``name key``. The name stands for the key in
metrics and messages. Blank lines and ``#`` lines are skipped.
"""

from __future__ import annotations

import hashlib
import os
from base64 import b64decode
from binascii import Error as Base64Error
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Final

from worker.console import read_file
from worker.errors import InputError
from worker.http.problems import ProblemError
from worker.secret import Secret

#: Shortest key, in characters: 128 bits in base64 are 22.
LEAST: Final = 16
#: Seconds over which the sessions of a key are counted.
PERIOD: Final = 60.0

_CHALLENGE: Final = {"WWW-Authenticate": 'Bearer realm="adcascade", Basic realm="adcascade"'}


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSettings:
    """The settings of a server; times are in seconds, and port 0 is any free port.

    Without keys, whoever can connect may send requests, for this machine, an IP address, or one of `allowed_hosts`.
    A request has `request_timeout` to come in.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    deadline: float = 0.05
    keys: ApiKeys | None = None
    max_sessions_per_key: int | None = None
    allowed_hosts: tuple[str, ...] = ()
    max_connections: int = 10_000
    max_record_bytes: int = 65_536
    request_timeout: float = 10.0


def read_keys(path: str) -> dict[str, Secret]:
    """Return the keys of a file by their names; raise `InputError` for what is not such a file."""
    keys: dict[str, Secret] = {}
    text = read_file(path, "--api-keys").decode("utf-8", errors="replace")
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        # Messages never have a part of the line: it may be a key.
        if len(words) != 2:
            raise InputError(f"{path}, line {number}: must have a name and a key")
        name, key = words
        if not name.isprintable() or len(name) > 64 or name in keys:
            raise InputError(f"{path}, line {number}: the name must be new, printable and at most 64 characters long")
        if len(key) < LEAST or not key.isascii():
            raise InputError(f"{path}, line {number}: the key must have at least {LEAST} ASCII characters")
        keys[name] = Secret(key)
    if not keys:
        raise InputError(f"{path} has no keys: every line is a name and a key")
    return keys


class ApiKeys:
    """Finds the name of the key that a request carries.

    Keys are looked up by a hash under a random secret of this process. So the time depends on the length of what a
    client sends and on nothing else.
    """

    def __init__(self, keys: Mapping[str, Secret]) -> None:
        self._salt = os.urandom(32)
        self._names = {self._digest(key.reveal()): name for name, key in keys.items()}

    def _digest(self, key: bytes) -> bytes:
        return hashlib.blake2b(key, key=self._salt, digest_size=32).digest()

    def name_of(self, authorization: str | None) -> str:
        """Return the name of the key in an `Authorization` header; raise `ProblemError` if there is no valid one.

        ``Bearer KEY`` is for programs. ``Basic``, with the key as the password, is for browsers.
        """
        key = _key_in(authorization)
        digest = self._digest(key)
        name = self._names.get(digest)
        if name is None or not key:
            raise ProblemError("unauthorized", "send the header Authorization: Bearer KEY", _CHALLENGE)
        return name


def _key_in(authorization: str | None) -> bytes:
    scheme, _, rest = (authorization or "").partition(" ")
    given = rest.strip().encode("utf-8", errors="surrogateescape")
    if scheme.lower() == "bearer":
        return given
    if scheme.lower() == "basic":
        try:
            return b64decode(given, validate=True).partition(b":")[2]
        except (Base64Error, ValueError):
            return b""
    return b""


class SessionQuota:
    """The sessions that a key may open in a minute.

    >>> now = [0.0]
    >>> quota = SessionQuota(1, clock=lambda: now[0])
    >>> quota.take("web")
    >>> try:
    ...     quota.take("web")
    ... except ProblemError as error:
    ...     error.headers
    {'Retry-After': '60'}
    >>> now[0] = 60.0
    >>> quota.take("web")
    """

    def __init__(self, most: int | None, clock: Callable[[], float]) -> None:
        self._most = most
        self._clock = clock
        self._began = clock()
        self._taken: Counter[str] = Counter()

    def take(self, name: str) -> None:
        """Count a session of a key; raise `ProblemError` if it may open no more now."""
        if self._most is None:
            return
        now = self._clock()
        if now - self._began >= PERIOD:
            self._began, self._taken = now, Counter()
        if self._taken[name] >= self._most:
            wait = ceil(self._began + PERIOD - now)
            detail = f"{self._most} sessions a minute"
            raise ProblemError("too-many-sessions", detail, {"Retry-After": str(max(1, wait))})
        self._taken[name] += 1
