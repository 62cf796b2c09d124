"""The client against real workers on the real broker: answers, restarts, new partitions, and a guarded broker."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar
from urllib.request import urlopen

import orjson
import pytest
from confluent_kafka.admin import NewPartitions

from tests.kafka.conftest import OwnBroker
from tests.kafka.fleet import Fleet, Running
from tests.kafka.guarded import Guarded, guarded_broker
from tests.kafka.world import ROOT, eventually
from worker.client import AdDecision, Client
from worker.client.kafka import KafkaTransport
from worker.errors import FailedError
from worker.stream.partitioning import murmur2_partition

pytestmark = pytest.mark.slow

T = TypeVar("T")
SECRET = {"ADCASCADE_TOKEN_SECRET": "a secret of twenty-odd bytes"}
CONTEXT = [0.1, -0.2, 0.3]
PATIENT = {"timeout": 60.0, "fallback": ["house"]}


@pytest.fixture(scope="module")
def served(address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with closing(Fleet(address, f"c{uuid.uuid4().hex[:8]}", tmp_path_factory.mktemp("client"))) as fleet:
        fleet.serving(**SECRET)
        yield fleet


def with_client(fleet: Fleet, use: Callable[[Client], Awaitable[T]], **settings: Any) -> T:
    async def run() -> T:
        prefix = fleet.names.prefix
        async with asyncio.timeout(120), Client(fleet.address, prefix=prefix, **{**PATIENT, **settings}) as ads:
            return await use(ads)

    return asyncio.run(run())


def facts(fleet: Fleet, session_id: str) -> list[dict[str, Any]]:
    """Return the journal of a session."""
    return [body for fact in fleet.facts() if (body := orjson.loads(fact)).get("session_id") == session_id]


def dead(fleet: Fleet) -> list[str]:
    return [dict(record.headers)["adcascade.reason"].decode() for record in fleet.read(fleet.names.dead_letters)]


# ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("prefetch", [True, False])
def test_a_cascade_is_answered_and_every_display_counts(served: Fleet, prefetch: bool) -> None:
    name = f"cascade-{prefetch}"

    async def use(ads: Client) -> list[AdDecision]:
        shown = [await ads.arrive(CONTEXT, session_id=name)]
        shown.append(await ads.passed(shown[-1]))
        shown.append(await ads.passed(shown[-1]))
        await ads.clicked(shown[-1])
        assert (await ads.arrive(CONTEXT, session_id=name)).ended
        return shown

    shown = with_client(served, use, prefetch=prefetch)
    assert [decision.arm for decision in shown] == list(shown[0].slate)
    assert [decision.origin for decision in shown[1:]] == ["slate" if prefetch else "worker"] * 2
    assert all(decision.token for decision in shown)
    eventually(lambda: len(facts(served, name)) == 4, what="the arrival and three displays are in the journal")
    told = {(fact["position"], fact["arm"], fact["clicked"]) for fact in facts(served, name) if "position" in fact}
    assert told == {(d.position, d.arm, d.position == 3) for d in shown}
    assert not dead(served)


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
    eventually(lambda: len(facts(fleet, "early")) == 2, what="the late session counts")
    assert not dead(fleet)


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

    async def use(ads: Client) -> None:
        transport = ads._exchange.transport
        # Sessions that a client would place elsewhere after the extension.
        moving = [n for n in (f"m{i}" for i in range(99)) if murmur2_partition(n.encode(), 8) >= 4][:5]
        before = [await ads.arrive(CONTEXT, session_id=name) for name in moving]
        for topic in (names.decisions, names.changelog, names.clicks, names.arrivals):
            await asyncio.to_thread(extend, fleet, topic, 8)
        worker.terminate()
        await asyncio.to_thread(fleet.serving)
        while transport.partitions != 8:  # noqa: ASYNC110 - the client has a deadline
            await asyncio.sleep(0.02)
        for shown in before:
            await ads.clicked(shown)
        placed = [f"n{number}" for number in range(40)]
        after = await asyncio.gather(*(ads.arrive(CONTEXT, session_id=name) for name in placed))
        assert not any(shown.timed_out for shown in after)
        assert [shown.partition for shown in after] == [murmur2_partition(name.encode(), 8) for name in placed]
        assert {shown.partition for shown in after} == set(range(8))

    transport = KafkaTransport(fleet.connection, names, refresh=0.2)
    with_client(fleet, use, transport=transport)
    arrived, clicked = ({r.key: r.partition for r in fleet.read(topic)} for topic in (names.arrivals, names.clicks))
    assert len(clicked) == 5
    assert all(arrived[key] == partition for key, partition in clicked.items())


# ── refusals ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_missing_topics_an_unreachable_broker_and_unequal_topics_are_reported_in_one_line(fleet: Fleet) -> None:
    extend(fleet, fleet.names.clicks, 5)
    eventually(lambda: len(fleet.ends(fleet.names.clicks)) == 5, what="the topic is extended")

    async def connect(servers: str, prefix: str) -> None:
        async with Client(servers, prefix=prefix):
            raise AssertionError("it has connected")

    for servers, prefix, complaint in (
        (fleet.address, "nowhere", "adcascade topics create"),
        ("127.0.0.1:1", "ads", "127.0.0.1:1"),
        (fleet.address, fleet.names.prefix, "the numbers must be equal"),
    ):
        with pytest.raises(FailedError, match=complaint) as refused:
            asyncio.run(connect(servers, prefix))
        assert "\n" not in str(refused.value)


# ── a guarded broker ─────────────────────────────────────────────────────────────────────────────────────────────────

PASSWORD = "sesame-sesame-open"
#: The rights of a client and of a gateway, as docs/clients.md has them.
RIGHTS = [
    {"resource": {"type": "topic", "name": f"ads.{topic}", "patternType": "literal"}, "operations": operations}
    for topic, operations in (
        ("arrivals", ["Describe", "Write"]),
        ("clicks", ["Describe", "Write"]),
        ("decisions", ["Describe", "Read"]),
    )
]


GATEWAY_RIGHTS = [
    *RIGHTS,
    {
        "resource": {"type": "topic", "name": "ads.parameters", "patternType": "literal"},
        "operations": ["Describe", "Read"],
    },
]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """A guarded broker with a worker, a user for clients and one for gateways."""
    users = {"shop": PASSWORD, "gateway": PASSWORD}
    with guarded_broker(tmp_path_factory.mktemp("guarded-client"), users) as made:
        made.allow("shop", RIGHTS)
        made.allow("gateway", GATEWAY_RIGHTS)
        with closing(Fleet(made.addresses["PLAINTEXT"], "ads", tmp_path_factory.mktemp("fleet"))) as fleet:
            fleet.serving()
            yield made


def test_the_documented_connection_has_enough_rights_and_shows_no_password_in_an_error(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs/clients.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^<!-- connection -->\n```python\n(.*?)^```$", page, re.M | re.S)
    example = example.replace("kafka:9093", guarded.addresses["SASL_SSL"]).replace("timeout=0.2", "timeout=60")
    example = example.replace("/etc/ssl/kafka-ca.pem", str(guarded.ca))

    async def use(ads: Client) -> AdDecision:
        async with asyncio.timeout(120), ads:
            shown = await ads.arrive(CONTEXT)
            await ads.clicked(shown)
            return shown

    def connect(password: str) -> AdDecision:
        monkeypatch.setenv("KAFKA_PASSWORD", password)
        names: dict[str, Any] = {}
        exec(example, names)
        return asyncio.run(use(names["ads"]))

    assert connect(PASSWORD).origin == "worker"
    with pytest.raises(FailedError, match="uthentication failed") as refused:
        connect("open-barley-open")
    assert "open-barley-open" not in str(refused.value)


def test_a_gateway_needs_no_more_rights_than_these_and_shows_no_password(guarded: Guarded, tmp_path: Path) -> None:
    flags = ["--broker", guarded.addresses["SASL_SSL"], "--tls-ca", str(guarded.ca), "--sasl-username", "gateway"]
    command = ("worker", "gateway", *flags, "--port", "0", "--deadline", "30s", "--log-level", "debug")
    gateway = Running(tmp_path / "gateway.log", *command, ADCASCADE_SASL_PASSWORD=PASSWORD)
    try:
        eventually(lambda: gateway.ready, what="the gateway is ready")
        body = orjson.dumps({"context": CONTEXT})
        with urlopen(f"{gateway.url}/v1/sessions", body, timeout=60) as answer:
            shown = orjson.loads(answer.read())
        assert shown["arm"]
        assert "fallback" not in shown
        pages = [gateway.ask(path)[1] for path in ("/metrics", "/readyz")]
        assert not [text for text in (*pages, gateway.log.read_text(encoding="utf-8")) if PASSWORD in text]
    finally:
        gateway.kill()
