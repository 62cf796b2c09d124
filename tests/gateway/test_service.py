"""The rules of the gateway, without workers and without HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import orjson
import pytest
from prometheus_client import CollectorRegistry

from tests.client.fake import FakeTransport, decision
from tests.programs import until
from tests.stream.scenes import parameters
from worker.client.exchange import Exchange
from worker.gateway.run import GATEWAY_CATALOGUE
from worker.gateway.service import KafkaAdService
from worker.http.service import AdRequest, Answer, UnavailableError
from worker.kafka.parameters import received
from worker.metrics.exposition import Series
from worker.stream.accounts import NOTHING, Accounts, Sums
from worker.stream.decoding import Limits, Rejected
from worker.stream.topology import Record, Topics
from worker.stream.version_records import encode_parameters

SLATE = ("cap", "shoe", "coat")
NOW = 2_000  # the decisions of the fake transport are for sessions that arrived at 1,000


class Gateway:
    """A service whose deadlines are far away, unless a test says otherwise."""

    def __init__(self, transport: FakeTransport, **settings: Any) -> None:
        self.transport = transport
        self.exchange = Exchange(transport, **{"remember": 100, "seconds": 60, **settings}, others=True)
        self.now = NOW
        self.service = KafkaAdService(self.exchange, Limits(), clock=lambda: self.now)

    async def arrive(
        self, session_id: str = "s", context: str = "[1,2]", *, within: float = 20.0, **more: str
    ) -> Answer:
        request = AdRequest(
            session_id,
            b"".join(
                b',"%b":%b' % (name.encode(), value.encode()) for name, value in {"context": context, **more}.items()
            ),
        )
        return await self.service.arrive(request, self.deadline(within))

    async def feedback(
        self, position: int, arm: str, clicked: bool = False, *, within: float = 20.0, **more: Any
    ) -> Answer:
        session_id = more.pop("session_id", "s")
        fields = {"position": position, "arm": arm, "clicked": clicked, **more}
        request = AdRequest(
            session_id, b"".join(b',"%b":%b' % (name.encode(), orjson.dumps(value)) for name, value in fields.items())
        )
        return await self.service.feedback(request, self.deadline(within))

    @staticmethod
    def deadline(within: float) -> float:
        return asyncio.get_running_loop().time() + within


@asynccontextmanager
async def gateway_on(transport: FakeTransport | None = None, **settings: Any) -> AsyncIterator[Gateway]:
    gateway = Gateway(transport or FakeTransport(answers=SLATE), **settings)
    gateway.service.adopt(parameters())
    await gateway.transport.start(gateway.exchange.receive)
    yield gateway


def shown(answer: Answer) -> dict[str, Any]:
    return dict(orjson.loads(answer.body()))


# ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_an_arrival_is_answered_with_the_bytes_of_the_worker_and_only_once() -> None:
    async with gateway_on() as gateway:
        first = await gateway.arrive()
        assert first.body() == decision("s", 1, SLATE)
        assert await gateway.arrive(context="[1.0, 2e0]", user_id='"u"') == first  # the same numbers
        assert await gateway.service.session("s") == first
        assert await gateway.service.session("another") is None
    transport = gateway.transport
    assert [record.value for record in transport.sent] == [b'{"session_id":"s","occurred_at":2000,"context":[1,2]}']


async def test_a_pass_is_answered_with_the_next_decision_and_a_click_with_the_end() -> None:
    transport = FakeTransport(answers=SLATE)
    async with gateway_on(transport) as gateway:
        await gateway.arrive()
        task = asyncio.create_task(gateway.feedback(1, "cap"))
        await until(lambda: len(transport.sent) == 2)
        transport.decide("s", 2, SLATE[1:])
        assert (await task).body() == decision("s", 2, SLATE[1:])
        end = Answer("s", None, "clicked")
        assert await gateway.feedback(2, "shoe", True) == end
        assert await gateway.feedback(2, "shoe", True) == end  # again
        assert await gateway.arrive() == await gateway.service.session("s") == end


async def test_the_pass_of_the_last_ad_ends_the_session_without_a_decision() -> None:
    async with gateway_on() as gateway:
        await gateway.arrive()
        assert await gateway.feedback(3, "coat") == Answer("s", None, "exhausted")
        assert await gateway.feedback(2, "shoe", True) == Answer("s", None, "clicked")  # a click is final
        assert await gateway.feedback(3, "coat") == Answer("s", None, "clicked")


async def test_a_session_without_eligible_ads_is_empty_and_one_whose_time_is_over_has_expired() -> None:
    async with gateway_on(FakeTransport(answers=())) as gateway:
        assert (await gateway.arrive("empty")).ended == "empty"
        gateway.transport.answers = SLATE
        await gateway.arrive()
        gateway.now = 11_001  # it arrived at 1,000, and sessions last for 10,000
        assert await gateway.service.session("s") == Answer("s", None, "expired")
        assert (await gateway.feedback(1, "cap")).ended == "expired"


async def test_a_click_after_the_time_of_its_session_is_sent_counted_as_late_and_answered_as_expired() -> None:
    async with gateway_on() as gateway:
        await gateway.arrive()
        assert (await gateway.feedback(1, "cap", True, occurred_at=11_000)).ended == "clicked"  # in time
        gateway.now = 11_001
        await gateway.arrive("t")
        assert await gateway.feedback(1, "cap", True, session_id="t") == Answer("t", None, "expired")
        assert [record.topic for record in gateway.transport.sent].count("clicks") == 2  # the workers count it as well
        assert gateway.service.late_feedback == 1


async def test_a_session_of_another_gateway_goes_on_here() -> None:
    transport = FakeTransport()
    async with gateway_on(transport) as gateway:
        transport.decide("s", 1, SLATE)
        assert (await gateway.arrive()).body() == decision("s", 1, SLATE)
        task = asyncio.create_task(gateway.feedback(1, "cap"))
        await until(lambda: transport.sent)
        transport.decide("s", 2, SLATE[1:])
        assert shown(await task)["arm"] == "shoe"
    assert [record.topic for record in transport.sent] == ["clicks"]


async def test_feedback_of_a_session_that_this_gateway_has_not_seen_is_sent() -> None:
    transport = FakeTransport()
    async with gateway_on(transport) as gateway:
        task = asyncio.create_task(gateway.feedback(1, "cap", token="t"))
        await until(lambda: transport.sent)
        transport.decide("s", 2, SLATE[1:])
        assert shown(await task)["arm"] == "shoe"
        assert await gateway.feedback(3, "coat", session_id="other") == Answer("other", None, "exhausted")
    assert transport.bodies("clicks")[0]["token"] == "t"


async def test_an_arrival_is_sent_while_feedback_of_the_same_session_waits() -> None:
    transport = FakeTransport()
    async with gateway_on(transport) as gateway:
        early = asyncio.create_task(gateway.feedback(1, "cap"))
        await until(lambda: transport.sent)
        late = asyncio.create_task(gateway.arrive())
        await until(lambda: len(transport.sent) == 2)
        transport.decide("s", 2, SLATE[1:])
        assert shown(await early) == shown(await late)
    assert [record.topic for record in transport.sent] == ["clicks", "arrivals"]


# ── deadlines ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_at_the_deadline_the_highest_paying_eligible_ads_are_answered_and_marked() -> None:
    transport = FakeTransport()
    async with gateway_on(transport) as gateway:
        answer = shown(await gateway.arrive(exclude='["coat"]', within=0.001))
        assert (answer["fallback"], answer["mode"], answer["arm"]) == (True, "fallback", "shoe")
        assert "tokens" not in answer
        with pytest.raises(Rejected, match="feedback for them does not count") as refused:
            await gateway.feedback(1, "shoe")
        assert refused.value.reason == "arm-mismatch"
        transport.decide("s", 1, SLATE[:2])
        assert shown(await gateway.arrive(exclude='["coat"]'))["arm"] == "cap"
    assert len(transport.sent) == 1


async def test_at_the_deadline_a_pass_is_answered_from_the_slate_if_it_is_known() -> None:
    transport = FakeTransport(answers=SLATE)
    transport.tokens = True
    async with gateway_on(transport) as gateway:
        await gateway.arrive()
        answer = shown(await gateway.feedback(1, "cap", within=0.001, token="token-1"))
        assert (answer["position"], answer["arm"], answer["slate"]) == (2, "shoe", ["shoe", "coat"])
        assert answer["tokens"] == ["token-2", "token-3"]
        assert "fallback" not in answer
        unseen = shown(await gateway.feedback(1, "cap", session_id="unseen", within=0.001))
        assert (unseen["fallback"], unseen["arm"]) == (True, "coat")


async def test_a_click_is_marked_if_the_brokers_have_none_at_the_deadline_and_fails_if_they_refuse_it() -> None:
    transport = FakeTransport(answers=SLATE, holds=True)
    async with gateway_on(transport) as gateway:
        await gateway.arrive()
        assert await gateway.feedback(1, "cap", True, within=0.001) == Answer("s", None, "clicked", fallback=True)
        for clicked in (True, False):
            task = asyncio.create_task(gateway.feedback(1, "cap", clicked, session_id=f"n{clicked}", within=2.0))
            sent = len(transport.sent)
            await until(lambda sent=sent: len(transport.sent) > sent)  # type: ignore[misc]
            transport.fail()
            with pytest.raises(UnavailableError, match="send it again"):
                await task


# ── rejections ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        ({"context": "[1]"}, "dimension"),
        ({"context": "[1e16,1]"}, "norm"),
        ({"context": '"x"'}, "invalid"),
        ({"context": "[1,"}, "undecodable"),
        ({"session_id": ""}, "invalid"),
        ({"user_id": '""'}, "invalid"),
        ({"exclude": "[1]"}, "invalid"),
        ({"occurred_at": "100000"}, "future"),
    ],
)
async def test_an_arrival_that_the_workers_would_reject_is_rejected_here(request_: dict[str, str], reason: str) -> None:
    async with gateway_on() as gateway:
        with pytest.raises(Rejected) as refused:
            await gateway.arrive(**request_)
        assert refused.value.reason == reason
    assert not gateway.transport.sent


async def test_another_arrival_with_the_same_id_is_rejected() -> None:
    async with gateway_on() as gateway:
        await gateway.arrive()
        for other in ({"context": "[1,3]"}, {"exclude": '["cap"]'}):
            with pytest.raises(Rejected) as refused:
                await gateway.arrive(**other)
            assert refused.value.reason == "session-reused"
    assert len(gateway.transport.sent) == 1


@pytest.mark.parametrize(
    ("position", "arm", "more", "reason"),
    [
        (1, "shoe", {"token": "token-1"}, "arm-mismatch"),
        (4, "shoe", {"token": "token-4"}, "position"),
        (0, "shoe", {"token": "token-1"}, "position"),
        (2, "shoe", {"token": "token-1"}, "token"),
        (1, "cap", {}, "token"),
        (1, "cap", {"token": "tökén"}, "token"),
        (1, "", {"token": "token-1"}, "invalid"),
        (1, "nothing", {"session_id": "unseen"}, "unknown-arm"),
    ],
)
async def test_feedback_that_does_not_fit_the_slate_or_the_catalogue_is_rejected(
    position: int, arm: str, more: dict[str, str], reason: str
) -> None:
    transport = FakeTransport(answers=SLATE)
    transport.tokens = True
    async with gateway_on(transport) as gateway:
        await gateway.arrive()
        with pytest.raises(Rejected) as refused:
            await gateway.feedback(position, arm, **more)
        assert refused.value.reason == reason
    assert len(gateway.transport.sent) == 1


async def test_feedback_is_never_earlier_than_the_arrival_where_clocks_differ() -> None:
    async with gateway_on() as gateway:
        await gateway.arrive()
        gateway.now = 500
        await gateway.feedback(1, "cap", True)
    assert gateway.transport.bodies("clicks")[0]["occurred_at"] == 1_000


# ── the published parameters ─────────────────────────────────────────────────────────────────────────────────────────


def test_newer_versions_are_adopted_and_older_ones_and_garbage_are_not() -> None:
    first, service, adopted = parameters(), Gateway(FakeTransport()).service, list[int]()
    assert service.version == -1
    versions = [encode_parameters(replace(first, version=number)) for number in (1, 0, 2)]
    for offset, value in enumerate((versions[0], b"no version", None, *versions[1:])):
        service.take([received(Record(Topics().parameters, 0, offset, 0, b"0", value))])
        adopted.append(service.version)
    assert adopted == [1, 1, 1, 1, 2]
    assert service.exchange.seconds > first.settings.grace / 1000, "sessions are remembered until they have ended"


# ── readiness and metrics ────────────────────────────────────────────────────────────────────────────────────────────


async def test_it_is_ready_when_parameters_are_published_and_the_brokers_can_be_reached() -> None:
    gateway = Gateway(FakeTransport(answers=SLATE))
    await gateway.transport.start(gateway.exchange.receive)
    assert "no parameters" in str(gateway.service.ready())
    for attempt in (gateway.arrive(), gateway.feedback(1, "cap")):
        with pytest.raises(UnavailableError, match="no parameters"):
            await attempt
    gateway.service.adopt(parameters())
    assert gateway.service.ready() is None
    gateway.transport.trouble = "no broker can be reached"
    assert gateway.service.ready() == "no broker can be reached"


async def test_the_metrics_are_those_of_the_catalogue_and_count() -> None:
    async with gateway_on() as gateway:
        await gateway.arrive()
        await gateway.feedback(1, "cap", True)
        registry = CollectorRegistry()
        registry.register(Series(GATEWAY_CATALOGUE, lambda: gateway.service))
        assert {metric.name for metric in registry.collect()} == {
            spec.name.removesuffix("_total") for spec in GATEWAY_CATALOGUE
        }
        value = registry.get_sample_value
        assert value("adcascade_gateway_records_total", {"topic": "arrivals"}) == 1
        assert value("adcascade_gateway_records_total", {"topic": "clicks"}) == 1
        assert value("adcascade_gateway_waits_total", {"end": "answered"}) == 1
        assert value("adcascade_gateway_remembered_sessions") == 1
        assert value("adcascade_gateway_connected") == 1
        assert value("adcascade_gateway_parameters_version") == 0


async def test_figures_come_with_the_newest_version_also_from_a_newer_position() -> None:
    async with gateway_on() as gateway:
        counted = replace(parameters(), accounts=Accounts(total=Sums(sessions=5)), journal_offset=9)
        for version in (counted, replace(counted, accounts=NOTHING, journal_offset=8)):
            gateway.service.adopt(version)
            assert gateway.service.newest().accounts.total.sessions == 5
