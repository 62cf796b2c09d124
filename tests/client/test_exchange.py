"""Whatever happens, in whatever order: every request ends, and nothing is left of it but what is to be remembered."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.client.fake import FakeTransport
from worker.client.exchange import Exchange, Known
from worker.client.transport import Keyed
from worker.stream.decoding import Rejected

SESSIONS = st.sampled_from("abc")
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("arrive"), SESSIONS, st.sampled_from((b"1", b"1", b"1", b"2"))),
        st.tuples(st.just("wait"), SESSIONS, st.integers(1, 3)),
        st.tuples(st.just("report"), SESSIONS, st.none()),
        st.tuples(st.just("decide"), SESSIONS, st.integers(1, 3)),
        st.tuples(st.sampled_from(("acknowledge", "fail", "cancel", "turn", "expire")), st.none(), st.none()),
    ),
    max_size=40,
)


class Schedule:
    """Steps on an exchange; requests run as tasks, with deadlines that only the step `expire` reaches."""

    def __init__(self) -> None:
        self.transport = FakeTransport(holds=True)
        self.exchange = Exchange(self.transport, remember=2, seconds=60, others=False)
        self.tasks: list[asyncio.Task[Any]] = []

    async def step(self, kind: str, session: Any, detail: Any) -> None:
        transport, exchange = self.transport, self.exchange
        deadline = asyncio.get_running_loop().time() + 3600
        if kind == "arrive":
            record = Keyed("arrivals", session.encode(), b'{"session_id":"%b"}' % session.encode())
            self.tasks.append(asyncio.create_task(exchange.arrive(record, detail, deadline)))
        elif kind == "wait":
            self.tasks.append(asyncio.create_task(exchange.decision(session.encode(), detail, deadline)))
        elif kind == "report":
            record = Keyed("clicks", session.encode(), b"{}")
            exchange.report(record)
        elif kind == "decide":
            transport.decide(session, detail, ("x", "y", "z")[detail - 1 :])
        elif kind == "cancel":
            for task in self.tasks[::2]:
                task.cancel()
        elif kind == "expire":
            self.expire()
        elif kind != "turn":
            getattr(transport, kind)()
        await asyncio.sleep(0)

    def expire(self) -> None:
        """End all waits as their deadlines would."""
        for session in list(self.exchange._sessions.values()):
            for _, answer in session.waits:
                if not answer.done():
                    answer.set_exception(TimeoutError())

    async def finish(self) -> list[Any]:
        """Let every request end; return the results."""
        while not all(task.done() for task in self.tasks):
            self.expire()
            self.transport.acknowledge()
            await asyncio.sleep(0)
        self.transport.acknowledge()
        await asyncio.sleep(0)
        return await asyncio.gather(*self.tasks, return_exceptions=True)


@given(STEPS)
def test_every_request_ends_and_leaves_nothing_behind(steps: list[tuple[str, Any, Any]]) -> None:
    async def run() -> None:
        schedule = Schedule()
        await schedule.transport.start(schedule.exchange.receive)
        async with asyncio.timeout(300):
            for step in steps:
                await schedule.step(*step)
            results = await schedule.finish()
        exchange = schedule.exchange
        assert not exchange._unacknowledged
        assert not any(session.waits or session.asking for session in exchange._sessions.values())
        assert all(
            result is None or isinstance(result, Known | Rejected | asyncio.CancelledError) for result in results
        )

    asyncio.run(run())
