"""`adcascade forget` on the real broker: sessions whose time is over are deleted, open ones go on."""

from __future__ import annotations

import time

import orjson
import pytest

from tests.embedded.traffic import ARMS
from tests.kafka.fleet import CommandLine, Fleet
from tests.programs import eventually
from worker.stream.contexts import pack_context
from worker.stream.session import Session, encode_state

pytestmark = pytest.mark.slow

WEEK = 7 * 86_400_000
SLATE = tuple(arm.arm for arm in ARMS[:3])
#: The partition of the sessions, which is not that of murmur2.
PLACE = 3


def test_sessions_that_are_over_are_deleted_and_open_ones_go_on(
    fleet: Fleet, capsys: pytest.CaptureFixture[str]
) -> None:
    names, now = fleet.names, time.time_ns() // 1_000_000
    users = {"over": "u", "open": "u", "other": "v"}
    ends = {"over": now - 1_000, "open": now + 600_000, "other": now - 1_000}

    def state(session: str) -> bytes:
        context, modes = pack_context((0.0, 0.0, 0.0)), ("exploit",) * len(SLATE)
        values = (0.5,) * len(SLATE)
        return encode_state(Session(now - 5_000, ends[session], context, (), 0, SLATE, modes, None, values))  # type: ignore[arg-type]

    for session, user in users.items():
        arrival = {"session_id": session, "user_id": user, "occurred_at": now - 5_000, "context": [0, 0, 0]}
        key = session.encode()
        records = [(names.arrivals, orjson.dumps(arrival)), *2 * [(names.changelog, state(session))]]
        fleet.send_raw([(topic, key, value) for topic, value in records], place=lambda key, count: PLACE)
    command = CommandLine(fleet, capsys)
    found = command.json("forget", "--user", "u", "--yes")
    assert (found["sessions"], found["deleted"]) == (["open", "over"], 1)
    arrivals, changelog = found["places"]
    assert (arrivals["name"], arrivals["records"], arrivals["deletable"]) == (names.arrivals, 2, 0)
    assert arrivals["until"] == arrivals["last"] + 2 * WEEK, "retention, and the age of a segment"
    assert (changelog["records"], changelog["until"]) == (4, None)
    assert changelog["note"].startswith("1 open, until ")
    table = {(one.partition, one.key): one.value for one in fleet.read(names.changelog)}
    assert table == {(PLACE, b"over"): None, (PLACE, b"open"): state("open"), (PLACE, b"other"): state("other")}
    assert command.json("forget", "--session", "over", "--yes")["deleted"] == 0
    assert command("forget", "--session", "nobody")[0] == 2

    worker = fleet.serving()
    passed = {"session_id": "open", "occurred_at": now, "position": 1, "arm": SLATE[0], "clicked": False}
    fleet.send_raw([(names.clicks, b"open", orjson.dumps(passed))], place=lambda key, count: PLACE)
    eventually(lambda: "open" in fleet.answered(), what="the open session goes on")
    eventually(lambda: worker.balanced)
