"""The client against real workers on the real broker: answers, timeouts, restarts and new partitions."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

import orjson
import pytest
from confluent_kafka.admin import NewPartitions

from tests.kafka.conftest import OwnBroker
from tests.kafka.fleet import Fleet
from tests.programs import eventually, until
from worker.client import AdDecision, Client
from worker.client.kafka import KafkaTransport
from worker.errors import FailedError
from worker.stream.topology import murmur2_partition

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


@pytest.mark.parametrize("prefetch", [True, False])
def test_a_cascade_is_answered_and_every_display_counts(served: Fleet, prefetch: bool) -> None:
    name, context = f"cascade-{prefetch}", [*CONTEXT, 0.4, 0.5]

    async def use(ads: Client) -> list[AdDecision]:
        shown = [await ads.arrive(context, session_id=name)]
        shown.append(await ads.passed(shown[-1]))
        shown.append(await ads.passed(shown[-1]))
        await ads.clicked(shown[-1])
        assert (await ads.arrive(context, session_id=name)).ended
        return shown

    shown = with_client(served, use, prefetch=prefetch)
    assert [decision.arm for decision in shown] == list(shown[0].slate)
    assert [decision.origin for decision in shown[1:]] == ["slate" if prefetch else "worker"] * 2
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
            following = during
            while following.timed_out:  # until the decision has come after all
                following = await ads.passed(following, within=30)
            assert following.session_id == "during"

        with_client(fleet, use, prefetch=False)
        wanted = {f"before-{number}" for number in range(5)}

        def clicked() -> set[str]:
            return {body["session_id"] for fact in fleet.facts() if (body := orjson.loads(fact)).get("clicked")}

        eventually(lambda: clicked() == wanted, what="every click is in the journal")


# ── new partitions ───────────────────────────────────────────────────────────────────────────────────────────────────


def extend(fleet: Fleet, topic: str, partitions: int) -> None:
    for extended in fleet.admin.create_partitions([NewPartitions(topic, partitions)]).values():
        extended.result()


def test_new_partitions_are_used_and_sessions_from_before_stay_where_they_are(fleet: Fleet) -> None:
    worker = fleet.serving()
    names = fleet.names
    transport = KafkaTransport(fleet.connection, names, refresh=0.2)

    async def use(ads: Client) -> None:
        # Sessions that a client would place elsewhere after the extension.
        moving = [n for n in (f"m{i}" for i in range(99)) if murmur2_partition(n.encode(), 8) >= 4][:5]
        before = [await ads.arrive(CONTEXT, session_id=name) for name in moving]
        for topic in (names.decisions, names.changelog, names.clicks, names.arrivals):
            await asyncio.to_thread(extend, fleet, topic, 8)
        worker.terminate()
        await asyncio.to_thread(fleet.serving)
        await until(lambda: transport.partitions == 8)
        for shown in before:
            await ads.clicked(shown)
        placed = [f"n{number}" for number in range(40)]
        after = await asyncio.gather(*(ads.arrive(CONTEXT, session_id=name) for name in placed))
        assert not any(shown.timed_out for shown in after)
        assert [shown.partition for shown in after] == [murmur2_partition(name.encode(), 8) for name in placed]
        assert {shown.partition for shown in after} == set(range(8))

    with_client(fleet, use, transport=transport)
    arrived, clicked = ({r.key: r.partition for r in fleet.read(topic)} for topic in (names.arrivals, names.clicks))
    assert len(clicked) == 5
    assert all(arrived[key] == partition for key, partition in clicked.items())


# ── refusals ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_topics_with_unequal_numbers_of_partitions_are_refused_in_one_line(fleet: Fleet) -> None:
    extend(fleet, fleet.names.clicks, 5)
    eventually(lambda: len(fleet.ends(fleet.names.clicks)) == 5, what="the topic is extended")

    async def connect() -> None:
        async with Client(fleet.address, prefix=fleet.names.prefix):
            raise AssertionError("it has connected")

    with pytest.raises(FailedError, match="the numbers must be equal") as refused:
        asyncio.run(connect())
    assert "\n" not in str(refused.value)
