"""Room for sessions: beyond it arrivals are answered and not remembered, and the accounts balance."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tests.stream.scenes import TOPICS, arrival, assert_balanced, click, decisions, facts, parameters, passed, stored
from worker.secret import Secret
from worker.stream.feedback import check_token
from worker.stream.serving import Serving, handle_together
from worker.stream.table import SessionRoom, state_size
from worker.stream.topology import Tally
from worker.stream.versions import Versions

SECRET = Secret(b"a secret of enough bytes")
LATER = 10_000_000


def served(most: int | None, room: SessionRoom | None = None, **more: Any) -> Serving:
    return Serving(Versions(parameters()), topics=TOPICS, room=room or SessionRoom(most), **more)


def held(task: Serving) -> int:
    return sum(map(state_size, task.table.values()))


def test_an_arrival_without_room_is_answered_and_leaves_nothing_behind() -> None:
    task = served(1, secret=SECRET)
    task.handle([arrival("a")])
    emits = task.handle([arrival("b", exclude=["coat"])])
    (decision,) = decisions(emits)
    assert (decision["mode"], decision["position"], decision["value"]) == ("fallback", 1, 0.0)
    assert "coat" not in decision["slate"]
    display = {"session_id": "b", "position": 1, "arm": decision["arm"]}
    assert check_token(SECRET, decision["tokens"][0], **display) == decision["arrived_at"]
    assert (emits.journal, emits.changelog, list(task.table)) == ([], [], ["a"])
    assert (emits.tally.arrivals, emits.tally.unremembered, emits.tally.opened) == (1, 1, 0)
    assert dict(emits.tally.decisions) == {"fallback": 1}
    ((kind, times, example),) = emits.tally.troubles
    assert (kind, times, example) == ("too-many-sessions", 1, "1 sessions are held, and 1 may be")


def test_within_a_batch_the_first_arrivals_get_the_room() -> None:
    task = served(2)
    emits = task.handle([arrival(name) for name in "abcdc"])
    assert list(task.table) == ["a", "b"]
    assert [fact["session_id"] for fact in facts(emits)] == ["a", "b"]
    assert {one["session_id"]: one["mode"] == "fallback" for one in decisions(emits)} == {
        "a": False,
        "b": False,
        "c": True,
        "d": True,
    }
    assert emits.tally.unremembered == 3


def test_a_session_that_is_remembered_stays_so() -> None:
    task = served(1)
    first = task.handle([arrival("a")])
    task.handle([arrival("b")])
    assert task.handle([arrival("a")]).decisions == first.decisions
    assert task.handle([passed("a", arm=decisions(first)[0]["arm"])]).tally.applied == 1


def test_an_arrival_that_comes_again_is_remembered_if_there_is_room_by_then() -> None:
    task = served(1)
    task.handle([arrival("a"), arrival("b")])
    task.acknowledged(LATER)
    emits = task.handle([arrival("b")])
    assert (emits.tally.opened, emits.tally.unremembered) == (1, 0)
    assert decisions(emits)[0]["mode"] != "fallback"


def test_partitions_share_the_room() -> None:
    room = SessionRoom(3)
    first, second = served(None, room), served(None, room, partition=1)
    emits = handle_together([(first, [arrival("a"), arrival("b")]), (second, [arrival("c"), arrival("d")])])
    assert [len(one.journal) for one in emits] == [2, 1]
    assert emits[0].tally.unremembered == 1
    first.hand_over()
    assert room.held == 1
    assert second.handle([arrival("d"), arrival("e"), arrival("f")]).tally.opened == 2


def test_sessions_that_are_taken_over_are_never_dropped() -> None:
    before = served(None)
    emits = before.handle([*(arrival(name) for name in "abc"), click("d")])
    task = served(2)
    task.restore(stored(emits.changelog))
    assert set(task.table) == set("abcd")
    assert task.handle([arrival("e")]).tally.unremembered == 1


def test_feedback_without_room_is_a_fact_and_is_not_parked() -> None:
    task = served(1)
    task.handle([arrival("a")])
    emits = task.handle([click("b")])
    assert [fact["kind"] for fact in facts(emits)] == ["feedback"]
    assert (emits.changelog, list(task.table), emits.tally.unparked) == ([], ["a"], 1)
    assert [kind for kind, _, _ in emits.tally.troubles] == ["too-many-sessions"]


def test_an_arrival_gets_the_room_of_its_parked_feedback() -> None:
    task = served(1)
    task.handle([click("a")])
    assert task.handle([click("a", position=2)]).tally.unparked == 1
    assert task.handle([arrival("a")]).tally.opened == 1


def test_large_feedback_takes_the_room_of_several_sessions() -> None:
    task = served(100)
    emits = task.handle([click(f"s{n}", padding="x" * 60_000) for n in range(10)])
    assert (len(task.table), emits.tally.unparked) == (2, 8)


names = st.sampled_from("abcdefgh")
records = st.one_of(
    st.builds(arrival, names),
    st.builds(arrival, names, exclude=st.just(["coat", "cap", "shoe"])),
    st.builds(click, names, position=st.integers(1, 4), arm=st.sampled_from(["coat", "cap", "none"])),
    st.builds(passed, names, padding=st.sampled_from(["", "x" * 3_000])),
)
steps = st.lists(records, max_size=6) | st.integers(0, 200).map(lambda seconds: seconds * 1_000) | st.none()


@hypothesis_settings(max_examples=200, deadline=None)
@given(most=st.integers(1, 4), plan=st.lists(steps, max_size=12))
def test_the_accounts_balance_and_the_bound_holds_whatever_comes(most: int, plan: list[Any]) -> None:
    """Batches, progress (a time), and the loss of the partition (None) with a restart from its changelog."""
    room = SessionRoom(most)
    task, tally, log, now = served(None, room), Tally(), dict[bytes, bytes | None](), 0
    largest = 1 + 3_000 // 1_024
    for step in plan:
        if step is None:
            tally.add(task.hand_over())
            assert room.held == 0
            task = served(None, room)
            tally.add(task.restore(stored(log.items())))
        elif isinstance(step, int):
            now = max(now, step)
            task.acknowledged(now)
        else:
            answered = {one.key for one in step if one.topic == TOPICS.arrivals}
            emits = task.handle(step)
            tally.add(emits.tally)
            log |= dict(emits.changelog)
            reused = {letter.key for letter in emits.dead_letters}
            open_ones = {key for key, _ in emits.decisions}
            ended = {name.encode() for name, state in task.table.items() if not getattr(state, "is_open", False)}
            assert answered <= open_ones | reused | ended
        assert room.held == held(task)
        assert room.held < most + largest + len("abcdefgh")
        assert_balanced(tally, task)
