"""The interface of the client: a session is opened, its ads are passed over or clicked."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterable, Sequence

from worker.client.decision import AdDecision, from_record
from worker.client.exchange import ClientCounts, Exchange
from worker.client.kafka import KafkaTransport
from worker.client.transport import ClientTransport, Context, Keyed, check_id, encode_arrival
from worker.errors import InputError
from worker.kafka.connection import Connection
from worker.runtime.clock import wall_clock
from worker.stream.decoding import Rejected
from worker.stream.events import Feedback, encode_event
from worker.stream.topology import Topics


class Client:
    """Ask the workers for ads, over Kafka.

    One client serves all tasks of a process. Trouble with Kafka never raises where an ad is needed: the fallback ads
    are the answer then, and `AdDecision.timed_out` says so.

    Parameters
    ----------
    servers : brokers (``host:port``, several with commas between or as a sequence), or a `Connection` with settings of
        librdkafka, such as those of TLS and SASL
    prefix : prefix of the topic names
    timeout : seconds after which an answer is given up
    fallback : ads to show if there is no answer in time, the first one first
    remember : most sessions that are remembered, for late decisions and repeated requests
    remember_seconds : how long they are remembered
    delivery_timeout : seconds after which a record that no broker accepted is given up
    transport : another way to the workers than Kafka
    """

    def __init__(
        self,
        servers: str | Iterable[str] | Connection = "127.0.0.1:9092",
        *,
        prefix: str = "ads",
        timeout: float = 0.2,
        fallback: Sequence[str] = (),
        remember: int = 20_000,
        remember_seconds: float = 70.0,
        delivery_timeout: float = 30.0,
        transport: ClientTransport | None = None,
    ) -> None:
        if not (timeout > 0 and delivery_timeout > 0 and remember >= 1):
            raise InputError("timeouts must be above 0, remember at least 1")
        self._timeout, self._fallback = timeout, tuple(fallback)
        self._exchange = Exchange(
            transport or KafkaTransport(_connection(servers), Topics(prefix), delivery_timeout=delivery_timeout),
            remember=remember,
            seconds=remember_seconds,
        )
        self._now: Callable[[], int] = wall_clock

    async def __aenter__(self) -> Client:
        await self._exchange.transport.start(self._exchange.receive)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._exchange.transport.stop()

    @property
    def counts(self) -> ClientCounts:
        """What has been sent, answered and missed so far."""
        return self._exchange.counts

    @property
    def trouble(self) -> str | None:
        """Why the workers cannot be asked at present; None if they can."""
        return self._exchange.transport.trouble

    async def arrive(
        self,
        context: Context,
        *,
        session_id: str | None = None,
        exclude: Sequence[str] = (),
        fallback: Sequence[str] | None = None,
        within: float | None = None,
        occurred_at: int | None = None,
        user_id: str | None = None,
    ) -> AdDecision:
        """Open a session, and return the first ad and those after it.

        A session id is unique for all times; by default it is a random one. The same id again, with the same context
        and exclusions, gives the current decision of that session. Raises `InputError` if they are not the same.

        Parameters
        ----------
        context : the numbers of the features in their order, or the features by name
        exclude : ads that must not be shown in this session
        fallback : as for the client, for this session
        within : seconds after which the answer is given up; the client's timeout by default
        occurred_at : time of the arrival in milliseconds since the epoch; now by default
        user_id : id of the user, if it is known; all sessions of a user are in the same group of a comparison
        """
        session_id = uuid.uuid4().hex if session_id is None else session_id
        check_id(session_id, "session")
        if user_id is not None:
            check_id(user_id, "user")
        occurred_at = self._now() if occurred_at is None else occurred_at
        value, request = encode_arrival(session_id, occurred_at, context, exclude, user_id)
        record = Keyed("arrivals", session_id.encode(), value)
        try:
            known = await self._exchange.arrive(record, request, self._deadline(within))
        except Rejected as rejected:
            raise InputError(f"session {session_id!r}: {rejected.error}") from None
        if known is not None:
            decision = from_record(known.decision())
            has_ended = self._exchange.ending(record.key) is not None
            return decision.at(decision.position + len(decision.slate)) if has_ended else decision
        ads = self._fallback if fallback is None else tuple(fallback)
        return AdDecision(session_id=session_id, arrived_at=occurred_at, position=1, slate=ads, origin="timeout")

    async def passed(self, decision: AdDecision) -> AdDecision:
        """Report that the ad was seen and passed over; return the next one.

        The answer is the next ad of the slate, immediately: slates are planned as a whole and never change.

        Fallback ads are not reported, since no worker planned them. After one, the answer is the decision of the
        workers if it has come meanwhile, or else the next fallback ad.
        """
        if decision.ended:
            raise InputError(f"session {decision.session_id!r} has ended: there is no ad to pass over")
        key = decision.session_id.encode()
        if decision.timed_out:
            known = self._exchange.known(key)
            if known is not None:
                return from_record(known.decision())
            return decision.at(decision.position + 1) if decision.slate else decision
        following = decision.at(decision.position + 1)
        self._report(decision, clicked=False)
        if following.ended:
            self._exchange.end(key, "exhausted")
        return following

    async def clicked(self, decision: AdDecision) -> None:
        """Report a click, and wait until the brokers have it. The session has ended with it.

        A click on a fallback ad is not reported, since no worker planned it. Raises `UndeliveredError` if the brokers
        do not accept the click in time.
        """
        if decision.arm is None:
            raise InputError(f"session {decision.session_id!r} shows no ad that could be clicked")
        if not decision.timed_out:
            await asyncio.shield(self._report(decision, clicked=True))
            self._exchange.end(decision.session_id.encode(), "clicked")

    async def report(
        self,
        session_id: str,
        *,
        position: int,
        arm: str,
        clicked: bool,
        token: str | None = None,
        occurred_at: int | None = None,
    ) -> None:
        """Report feedback by its parts, as a browser sends them back, and wait until the brokers have it."""
        feedback = Feedback(
            session_id=session_id,
            occurred_at=self._now() if occurred_at is None else occurred_at,
            position=position,
            arm=arm,
            clicked=clicked,
            token=token,
        )
        await asyncio.shield(self._send(feedback))

    async def flush(self) -> None:
        """Wait until the brokers have everything. Raises `UndeliveredError` if they do not accept a record in time."""
        await self._exchange.flush()

    def _report(self, decision: AdDecision, *, clicked: bool) -> asyncio.Future[None]:
        feedback = Feedback(
            session_id=decision.session_id,
            # Feedback before its arrival would not count, and the clocks of two machines may differ.
            occurred_at=max(self._now(), decision.arrived_at),
            position=decision.position,
            arm=decision.slate[0],
            clicked=clicked,
            token=decision.token,
        )
        return self._send(feedback)

    def _send(self, feedback: Feedback) -> asyncio.Future[None]:
        return self._exchange.report(Keyed("clicks", feedback.session_id.encode(), encode_event(feedback)))

    def _deadline(self, seconds: float | None) -> float:
        return asyncio.get_running_loop().time() + (self._timeout if seconds is None else seconds)


def _connection(servers: str | Iterable[str] | Connection) -> Connection:
    if isinstance(servers, Connection):
        return servers
    listed = servers.split(",") if isinstance(servers, str) else servers
    return Connection(servers=tuple(server.strip() for server in listed))
