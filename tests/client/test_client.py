"""The rules of the client, without a broker."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from tests.client.fake import FakeTransport
from tests.programs import until
from worker.client import AdDecision, Client, UndeliveredError
from worker.errors import InputError

SLATE = ("shoes", "hats", "gloves")


def client_on(transport: FakeTransport, **settings: Any) -> Client:
    """Return a client that waits for its answers as long as the test may take."""
    return Client(transport=transport, **{"timeout": 100, **settings})


# ── a session ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_session_goes_through_its_slate_until_a_click() -> None:
    transport = FakeTransport(answers=SLATE)
    async with client_on(transport) as ads:
        first = await ads.arrive([1, 2.5], session_id="s")
        assert (first.arm, first.position, first.origin, first.ended) == ("shoes", 1, "worker", False)
        assert (first.mode, first.propensity, first.value, first.parameters_version) == ("exploit", 1.0, 0.5, 7)
        second = await ads.passed(first)
        assert (second.arm, second.position, second.origin) == ("hats", 2, "slate")
        await ads.clicked(second)
    [arrival] = transport.bodies("arrivals")
    assert arrival["session_id"] == "s"
    assert arrival["context"] == [1, 2.5]
    assert [(f["position"], f["arm"], f["clicked"]) for f in transport.bodies("clicks")] == [
        (1, "shoes", False),
        (2, "hats", True),
    ]
    assert transport.stopped


async def test_a_slate_that_is_passed_over_ends_the_session() -> None:
    async with client_on(FakeTransport(answers=SLATE)) as ads:
        shown = await ads.arrive([1])
        for _ in SLATE:
            assert not shown.ended
            shown = await ads.passed(shown)
        assert shown.ended
        assert (shown.arm, shown.position) == (None, 4)
        with pytest.raises(InputError, match="has ended"):
            await ads.passed(shown)
        with pytest.raises(InputError, match="no ad"):
            await ads.clicked(shown)


async def test_a_session_without_eligible_ads_has_ended_at_once() -> None:
    async with client_on(FakeTransport(answers=())) as ads:
        shown = await ads.arrive([1])
        assert shown.ended
        assert (shown.arm, shown.mode) == (None, "none")


async def test_feedback_carries_the_token_of_its_display() -> None:
    transport = FakeTransport(answers=SLATE)
    transport.tokens = True
    async with client_on(transport) as ads:
        shown = await ads.arrive([1], session_id="s")
        await ads.clicked(await ads.passed(shown))
        await ads.report("s", position=2, arm="hats", clicked=True, token="mine")
        await ads.report("stranger", position=1, arm="hats", clicked=True)
        await ads.clicked(shown.at(3))  # a client that shows the whole slate reports once
        with pytest.raises(InputError, match="not in the slate"):
            shown.at(5)
    clicks = transport.bodies("clicks")
    assert [click.get("token") for click in clicks] == ["token-1", "token-2", "mine", None, "token-3"]
    assert (clicks[-1]["position"], clicks[-1]["arm"]) == (3, "gloves")


async def test_feedback_is_never_earlier_than_the_arrival_where_clocks_differ() -> None:
    transport = FakeTransport()
    ahead = AdDecision(session_id="s", arrived_at=2**50, position=1, slate=("a",), origin="worker")
    async with client_on(transport) as ads:
        await ads.clicked(ahead)
    assert transport.bodies("clicks")[0]["occurred_at"] == 2**50


# ── contexts and ids ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("context", "sent"),
    [
        ([0.5, 1], [0.5, 1]),
        (np.array([0.5, 1.0]), [0.5, 1.0]),
        ((np.float64(0.5), 1), [0.5, 1]),
        ({"hour": 7, "device": "phone", "new": True}, {"hour": 7, "device": "phone", "new": True}),
    ],
)
async def test_a_context_is_numbers_or_named_features(context: Any, sent: Any) -> None:
    transport = FakeTransport(answers=SLATE)
    async with client_on(transport) as ads:
        await ads.arrive(context, exclude=["hats"], user_id="u")
    [arrival] = transport.bodies("arrivals")
    assert (arrival["context"], arrival["exclude"], arrival["user_id"]) == (sent, ["hats"], "u")


@pytest.mark.parametrize("context", [[float("nan")], np.array([np.inf]), {"hour": float("-inf")}, [object()]])
async def test_what_json_cannot_hold_is_refused_and_not_sent(context: Any) -> None:
    transport = FakeTransport(answers=SLATE)
    async with client_on(transport) as ads:
        with pytest.raises(InputError, match="context"):
            await ads.arrive(context)
    assert not transport.sent


@pytest.mark.parametrize("session_id", ["", "x" * 129, "a\nb"])
async def test_an_id_that_workers_refuse_is_refused_here(session_id: str) -> None:
    async with client_on(FakeTransport()) as ads:
        with pytest.raises(InputError, match="session id"):
            await ads.arrive([1], session_id=session_id)
        with pytest.raises(InputError, match="user id"):
            await ads.arrive([1], user_id=session_id)


# ── timeouts ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_without_an_answer_in_time_the_fallback_ads_are_shown_and_never_reported() -> None:
    transport = FakeTransport()
    async with client_on(transport, fallback=["house-1", "house-2"]) as ads:
        shown = await ads.arrive([1], session_id="s", within=0.001)
        assert shown.timed_out
        assert not shown.ended
        assert (shown.arm, shown.mode) == ("house-1", None)
        following = await ads.passed(shown)
        assert (following.arm, following.timed_out) == ("house-2", True)
        await ads.clicked(following)
        last = await ads.passed(following)
        assert (last.arm, last.timed_out) == (None, True)
        assert await ads.passed(last) == last
        other = await ads.arrive([1], within=0.001, fallback=["mine"])
        assert other.arm == "mine"
        assert ads.counts.timed_out == 2
    assert not transport.bodies("clicks")


async def test_a_late_decision_follows_the_fallback_ad() -> None:
    transport = FakeTransport()
    async with client_on(transport, fallback=["house"]) as ads:
        shown = await ads.arrive([1], session_id="s", within=0.001)
        transport.decide("s", 1, SLATE)
        assert ads.counts.late == 1
        shown = await ads.passed(shown)
        assert (shown.arm, shown.position, shown.origin) == ("shoes", 1, "worker")
    assert not transport.bodies("clicks")


async def test_a_cancelled_wait_leaves_nothing_behind() -> None:
    transport = FakeTransport()
    async with client_on(transport) as ads:
        task = asyncio.create_task(ads.arrive([1], session_id="s"))
        await until(lambda: transport.sent)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        transport.decide("s", 1, SLATE)
        assert (await ads.arrive([1], session_id="s")).arm == "shoes"
    assert len(transport.sent) == 1


# ── repeats ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_repeated_decisions_earlier_ones_and_those_of_others_change_nothing() -> None:
    transport = FakeTransport()
    async with client_on(transport) as ads:
        task = asyncio.create_task(ads.arrive([1], session_id="s"))
        await until(lambda: transport.sent)
        transport.decide("another", 1, ("wrong",))
        transport.deliver(None, b"{}")
        transport.deliver(b"s", None)
        transport.deliver(b"s", b"no decision")
        transport.decide("s", 1, SLATE)
        transport.decide("s", 1, ("changed",))
        assert (await task).slate == SLATE
        transport.decide("s", 2, SLATE[1:])
        transport.decide("s", 1, SLATE)
        shown = await ads.arrive([1], session_id="s")
        assert (shown.arm, shown.position, shown.origin) == ("hats", 2, "worker")
        assert ads.counts.repeated == 2


async def test_the_same_session_again_is_answered_from_memory_and_once_on_its_way_is_sent_once() -> None:
    transport = FakeTransport()
    async with client_on(transport) as ads:
        tasks = [asyncio.create_task(ads.arrive([1], session_id="s")) for _ in range(3)]
        await until(lambda: transport.sent)
        await asyncio.sleep(0)
        transport.decide("s", 1, SLATE)
        assert {(await task).arm for task in tasks} == {"shoes"}
        assert (await ads.arrive([1], session_id="s")).arm == "shoes"
        with pytest.raises(InputError, match="ids must be unique"):
            await ads.arrive([2], session_id="s")
    assert len(transport.sent) == 1


async def test_a_session_without_an_answer_is_asked_for_again_with_the_same_bytes() -> None:
    transport = FakeTransport()
    async with client_on(transport) as ads:
        assert (await ads.arrive([1], session_id="s", within=0.001)).timed_out
        ads._now = lambda: 5  # another time: as bytes it would be another arrival, and a dead letter
        assert (await ads.arrive([1], session_id="s", within=0.001)).timed_out
    first, second = transport.sent
    assert first == second


async def test_a_session_that_was_clicked_or_exhausted_here_has_ended_when_it_is_asked_for_again() -> None:
    async with client_on(FakeTransport(answers=SLATE)) as ads:
        await ads.clicked(await ads.arrive([1], session_id="clicked"))
        assert (await ads.arrive([1], session_id="clicked")).ended
        await ads.passed((await ads.arrive([1], session_id="exhausted")).at(3))
        assert (await ads.arrive([1], session_id="exhausted")).ended


async def test_memory_is_bounded_by_number_and_age_but_keeps_those_who_wait() -> None:
    transport = FakeTransport()
    async with client_on(transport, remember=10) as ads:
        waiting = asyncio.create_task(ads.arrive([1], session_id="waits"))
        await until(lambda: transport.sent)
        for number in range(50):
            await ads.arrive([1], session_id=f"s{number}", within=0.0001)
        assert len(ads._exchange._sessions) <= 11
        transport.decide("waits", 1, SLATE)
        assert (await waiting).arm == "shoes"
        ads._exchange.seconds = 0.0  # all are too old
        await ads.arrive([1], session_id="later", within=0.0001)
        assert list(ads._exchange._sessions) == [b"later"]


# ── delivery ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_click_waits_for_the_brokers_and_a_pass_does_not() -> None:
    transport = FakeTransport(answers=SLATE, holds=True)
    async with client_on(transport) as ads:
        shown = await ads.passed(await ads.arrive([1]))
        click = asyncio.create_task(ads.clicked(shown))
        await until(lambda: len(transport.sent) == 3)
        await asyncio.sleep(0)
        assert not click.done()
        transport.acknowledge()
        await click
        await ads.flush()


async def test_what_no_broker_takes_is_reported_for_clicks_and_by_flush_and_counted() -> None:
    transport = FakeTransport(answers=SLATE, holds=True)
    async with client_on(transport) as ads:
        shown = await ads.arrive([1], session_id="s")
        for attempt in (ads.clicked(shown), ads.flush(), ads.report("s", position=1, arm="a", clicked=True)):
            task = asyncio.create_task(attempt)
            await asyncio.sleep(0)
            transport.fail()
            with pytest.raises(UndeliveredError, match="no broker accepted the record"):
                await task
            assert await ads.arrive([1], session_id="s") == shown, "the session has not ended"
            await ads.passed(shown)
        assert ads.counts.undelivered >= 3
        transport.acknowledge()


# ── the package ──────────────────────────────────────────────────────────────────────────────────────────────────────


IMPORT = """
import gc, logging, signal, sys, threading

def process():
    signals = [signal.getsignal(number) for number in signal.valid_signals()]
    log = logging.root.level, list(logging.root.handlers), logging.getLoggerClass()
    hooks = sys.excepthook, threading.excepthook
    return signals, log, hooks, gc.get_threshold(), sys.getswitchinterval(), threading.active_count()

before = process()
import worker.client
assert process() == before
others = ("faust", "mode", "aiokafka", "aiohttp")
print([name for name in sys.modules if name.partition(".")[0] in others or "simulation" in name])
"""


def test_importing_the_client_loads_no_framework_and_changes_nothing_in_the_process() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_the_public_names_are_these() -> None:
    import worker.client

    assert worker.client.__all__ == ["AdDecision", "Client", "ClientCounts", "Connection", "Origin", "UndeliveredError"]


@pytest.mark.parametrize(
    "settings",
    [
        *({"timeout": 0}, {"remember": 0}, {"delivery_timeout": -1}),
        *({"servers": ""}, {"servers": "localhost"}, {"servers": ["a:1", "b"]}),
    ],
)
def test_settings_that_make_no_sense_and_addresses_without_a_port_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        Client(**settings)
