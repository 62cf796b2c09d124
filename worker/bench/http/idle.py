"""Connections that do nothing, held by a process of its own.

python -m worker.bench.http.idle URL COUNT

It prints how many it holds, and ends with its standard input.
"""

from __future__ import annotations

import resource
import socket
import sys
from typing import Final
from urllib.parse import urlsplit

#: File descriptors that are kept for everything but connections.
_RESERVED: Final = 64


def hold(url: str, count: int) -> list[socket.socket]:
    """Open connections, as many as this process may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + _RESERVED
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft != resource.RLIM_INFINITY:
        count = min(count, soft - _RESERVED)
    parts = urlsplit(url)
    address = parts.hostname or "", parts.port or 0
    return [socket.create_connection(address, timeout=30) for _ in range(count)]


if __name__ == "__main__":
    held = hold(sys.argv[1], int(sys.argv[2]))
    sys.stdout.write(f"{len(held)}\n")
    sys.stdout.flush()
    sys.stdin.read()
