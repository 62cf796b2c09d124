"""The client as a process of its own; it prints its result as JSON.

python -m worker.bench.http.load URL SECONDS RATE
"""

from __future__ import annotations

import asyncio
import selectors
import sys

import msgspec

from worker.bench.http.client import load


def precise_loop() -> asyncio.AbstractEventLoop:
    """Return a loop whose timers are exact to microseconds.

    With epoll they are whole milliseconds, rounded up: requests would leave 0.6 ms after they were due, in bunches, and
    that would count as a wait for the server.
    """
    return asyncio.SelectorEventLoop(selectors.SelectSelector())


if __name__ == "__main__":
    rate = float(sys.argv[3])
    with asyncio.Runner(loop_factory=precise_loop if rate else None) as runner:
        result = runner.run(load(sys.argv[1], float(sys.argv[2]), rate))
    sys.stdout.buffer.write(msgspec.json.encode(result) + b"\n")
