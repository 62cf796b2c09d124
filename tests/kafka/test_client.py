"""The client against real workers on the real broker: answers, timeouts and restarts."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

import orjson
import pytest

from tests.kafka.conftest import OwnBroker
from tests.kafka.fleet import Fleet
from tests.murmur2 import murmur2_partition
from tests.programs import eventually
from worker.client import AdDecision, Client

pytestmark = pytest.mark.slow

T = TypeVar("T")
CONTEXT = [0.1, -0.2, 0.3]
PATIENT = {"timeout": 300.0, "fallback": ["house"]}


def with_client(fleet: Fleet, use: Callable[[Client], Awaitable[T]], **settings: Any) -> T:
    async def run() -> T:
        prefix = fleet.names.prefix
        async with asyncio.timeout(600), Client(fleet.address, prefix=prefix, **{**PATIENT, **settings}) as ads:
            return await use(ads)

    return asyncio.run(run())


# ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_cascade_is_answered_and_every_display_counts(served: Fleet) -> None:
    name, context = "cascade", [*CONTEXT, 0.4, 0.5]

    async def use(ads: Client) -> list[AdDecision]:
        shown = [await ads.arrive(context, session_id=name)]
        shown.append(await ads.passed(shown[-1]))
        shown.append(await ads.passed(shown[-1]))
        await ads.clicked(shown[-1])
        assert (await ads.arrive(context, session_id=name)).ended
        return shown

    shown = with_client(served, use)
    assert [decision.arm for decision in shown] == list(shown[0].slate)
    assert [decision.origin for decision in shown[1:]] == ["slate"] * 2
    assert all(decision.token for decision in shown)
    wanted = {(one.position, one.arm, one.position == 3) for one in shown}
    eventually(lambda: served.displays(name) == wanted, what="three displays are in the journal")
    assert name.encode() not in served.dead_keys()


# ── timeouts ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_without_a_worker_the_fallback_is_shown_and_the_late_decision_follows_it(fleet: Fleet) -> None:
    async def use(ads: Client) -> None:
        shown = await ads.arrive(CONTEXT, session_id="early", within=0.2)
        assert (shown.arm, shown.timed_out) == ("house", True)
        assert ads.trouble is None
        await asyncio.to_thread(fleet.serving)
        # An arrival behind it in the same partition is answered: so the first one is, too.
        same = next(f"s{n}" for n in range(99) if murmur2_partition(b"s%d" % n, 4) == murmur2_partition(b"early", 4))
        assert not (await ads.arrive(CONTEXT, session_id=same)).timed_out
        shown = await ads.passed(shown)
        assert (shown.origin, shown.position) == ("worker", 1)
        await ads.clicked(shown)
        assert ads.counts.late == 1

    with_client(fleet, use)
    eventually(lambda: fleet.displays("early"), what="the late session counts")
    assert not fleet.dead_keys()


# ── restarts ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_after_a_kill_of_the_broker_it_goes_on_and_no_click_is_lost(own_broker: OwnBroker, tmp_path: Path) -> None:
    with closing(Fleet(own_broker.address, f"r{uuid.uuid4().hex[:8]}", tmp_path)) as fleet:
        fleet.serving()

        async def use(ads: Client) -> None:
            before = [await ads.arrive(CONTEXT, session_id=f"before-{number}") for number in range(5)]
            restart = asyncio.create_task(asyncio.to_thread(own_broker.restart, "--kill"))
            clicks = [asyncio.create_task(ads.clicked(shown)) for shown in before]
            during = await ads.arrive(CONTEXT, session_id="during", within=0.05)
            await restart
            await asyncio.gather(*clicks)
            assert not (await ads.arrive(CONTEXT, session_id="after")).timed_out
            if during.timed_out:
                during = await ads.arrive(CONTEXT, session_id="during", within=30)
            assert during.origin == "worker"

        with_client(fleet, use)
        wanted = {f"before-{number}" for number in range(5)}

        def clicked() -> set[str]:
            return {body["session_id"] for fact in fleet.facts() if (body := orjson.loads(fact)).get("clicked")}

        eventually(lambda: clicked() == wanted, what="every click is in the journal")
