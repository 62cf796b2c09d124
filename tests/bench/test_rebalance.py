"""What clients wait for while workers come and go: the figures and the users, without a broker."""

from __future__ import annotations

import asyncio

from tests.client.fake import FakeTransport
from worker.bench.kafka import rebalance
from worker.bench.kafka.rebalance import Round, Scale, figures
from worker.bench.kafka.recording import Script
from worker.bench.kafka.users import LOOK, TICK, WaitingUsers

SECOND = 1_000_000_000


def played(*waits: float, unanswered: int = 0) -> Round:
    """Return a round with an arrival in each part, which waits so many seconds."""
    sent = [100 * part * SECOND for part in range(len(waits))]
    answered = {part: sent[part] + int(wait * SECOND) for part, wait in enumerate(waits)}
    return Round(sent=[*sent, *[sent[-1]] * unanswered], answered=answered, events=[time - 1 for time in sent[1:]])


def test_the_longest_wait_of_all_rounds_counts() -> None:
    seen = list(figures([played(0.1, 1, 2, 10), played(0.2, 3.5, 1, 11)], Scale()))
    assert len(seen) == rebalance.FIGURES
    assert [one.value for one in seen] == [0.2, 3.5, 2, 11, 0]
    assert [one.met for one in seen] == [None, False, True, None, True]
    assert "rounds: 10.00, 11.00" in seen[3].detail


def test_an_arrival_without_a_decision_misses_the_target() -> None:
    *_, last = figures([played(0.1, 1, 1, 10, unanswered=2), played(0.1, 1, 1, 10)], Scale())
    assert (last.value, last.met) == (2, False)


def test_an_arrival_that_a_killed_worker_held_belongs_to_the_kill() -> None:
    one = Round(sent=[0, 9 * SECOND], answered={0: SECOND, 1: 20 * SECOND}, events=[10 * SECOND])
    assert one.longest() == [1, 11]


def test_users_report_a_display_only_when_its_decision_has_come() -> None:
    async def scenario() -> None:
        transport = FakeTransport()
        users = WaitingUsers(
            transport, [Script(arrival=b',"context":[]}', clicks=(b',"position":1}', b',"position":2}'))]
        )
        await transport.start(users.receive)
        looks = round(LOOK / TICK) + 1
        users.step(1)
        for _ in range(2 * looks):
            users.step(1)
        assert (len(users.sent), users.answered) == (1, {}), "no decision, no feedback"
        assert transport.bodies("clicks") == []
        for position in (1, 1, 2, 1, 3):  # with repeats, and one after the last display
            transport.decide("waiting-0", position, ("a", "b"))
            for _ in range(looks):
                users.step(1)
        transport.decide("somebody-else", 1, ("a",))
        assert [body["position"] for body in transport.bodies("clicks")] == [1, 2]
        assert list(users.answered) == [0]

    asyncio.run(scenario())


def test_users_end_when_every_session_is_answered() -> None:
    async def scenario() -> None:
        transport = FakeTransport(answers=("a",))
        users = WaitingUsers(transport, [Script(arrival=b"}", clicks=())])
        await users.play(rate=1000, seconds=5 * TICK, silence=60)
        assert len(users.sent) == len(users.answered) == 35
        assert transport.stopped

    asyncio.run(scenario())
