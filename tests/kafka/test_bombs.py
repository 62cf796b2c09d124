"""Records and stored values that ended the worker, again and again, before their size was bounded."""

from __future__ import annotations

import re
from collections import Counter
from hashlib import sha256
from pathlib import Path

import orjson
import pytest
from worker.kafka.unpacking import MOST_UNPACKED

from tests.embedded.traffic import START, arrivals
from tests.kafka.fleet import Fleet, Running
from tests.kafka.world import eventually
from worker.stream.topology import CUT_BYTES, LEAST_BYTES

pytestmark = pytest.mark.slow

HUGE = b'{"session_id":"huge","padding":"' + b"x" * 70_000_000 + b'"}'
MEBIBYTE = 1 << 20


def memory(worker: Running) -> int:
    """Return the most memory that a worker has taken, in bytes."""
    status = Path(f"/proc/{worker.process.pid}/status").read_text(encoding="ascii")
    found = re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
    assert found
    return int(found[1]) * 1024


def large_arrival() -> bytes:
    """Return an arrival whose fact is larger than the smallest topic takes."""
    exclude = ["😀" * 60 + str(n) for n in range(250)]
    body = {"session_id": "large", "occurred_at": START, "context": [0.0, 0.0, 0.0], "exclude": exclude}
    return orjson.dumps(body)


def test_bombs_large_outputs_small_topics_and_damaged_state_cost_a_dead_letter_and_nothing_else(fleet: Fleet) -> None:
    fleet.set_clock(START)
    names = fleet.names
    fleet.configure(names.decisions, max_message_bytes=str(LEAST_BYTES))
    first = fleet.serving()
    good = arrivals(800, seconds=1)
    fleet.send(good[:20])
    eventually(lambda: len(fleet.answered()) == 20, what="all are answered")
    assert first.terminate()[0] == 0, first.tail()
    damaged = good[0].session.encode()
    fleet.send_raw([(names.changelog, damaged, b"\x05"), (names.changelog, b"unknown", b"{}")])

    worker = fleet.serving()
    fleet.send_raw([(names.arrivals, b"huge", HUGE)])
    bomb = bytes(MOST_UNPACKED + MEBIBYTE)
    fleet.send_raw([(names.arrivals, b"bomb", bomb)] * 2, compression="zstd")
    fleet.send_raw([(names.clicks, b"bomb", bomb)], compression="lz4")
    del bomb
    fleet.send_raw([(names.arrivals, b"large", large_arrival())])
    for n, codec in enumerate(("gzip", "snappy", "lz4", "zstd")):
        some = good[20:][n::4]
        fleet.send_raw(((names.arrivals, one.session.encode(), one.value) for one in some), compression=codec)

    eventually(lambda: len(fleet.answered()) == len(good), what="all are answered")
    eventually(lambda: len(fleet.read(names.dead_letters)) == 5, what="dead letters")
    assert fleet.running == [worker], "it was not restarted"
    assert memory(worker) < 700 * MEBIBYTE
    letters = {record.key: dict(record.headers) for record in fleet.read(names.dead_letters)}
    reasons = Counter(dict(record.headers)["adcascade.reason"] for record in fleet.read(names.dead_letters))
    assert reasons == {b"too-large": 2, b"unreadable": 3}
    huge = next(record for record in fleet.read(names.dead_letters) if record.key == b"huge")
    assert huge.value == HUGE[:CUT_BYTES]
    assert letters[b"huge"]["adcascade.cut"] == b"value"
    assert letters[b"huge"]["adcascade.length"] == b"%d" % len(HUGE)
    assert letters[b"huge"]["adcascade.sha256"] == sha256(HUGE).hexdigest().encode()
    assert b"unpacks to more than" in letters[None]["adcascade.error"]
    assert "adcascade.last-offset" in letters[None]
    assert b"large" not in {record.key for topic in (names.journal, names.changelog) for record in fleet.read(topic)}

    log = worker.log.read_text(encoding="utf-8")
    assert re.search(rf"{re.escape(names.changelog)}, partition \d, offset \d+, key b'", log)
    for kind, least in {"damaged-state": 2, "bomb": 3, "too-large-output": 1}.items():
        assert worker.metric(f'adcascade_troubles_total{{kind="{kind}"}}') == least
    stored = {record.key: record.value for record in fleet.read(names.changelog)}
    assert stored[damaged] is None and stored[b"unknown"] is None, "each is reported once"
    assert worker.balanced
