"""The client as a process of its own; it prints its result as JSON.

python -m worker.bench.http.load URL SECONDS RATE
"""

from __future__ import annotations

import asyncio
import sys

import msgspec

from worker.bench.http.client import load

if __name__ == "__main__":
    result = asyncio.run(load(sys.argv[1], float(sys.argv[2]), float(sys.argv[3])))
    sys.stdout.buffer.write(msgspec.json.encode(result) + b"\n")
