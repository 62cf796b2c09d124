"""Serving one partition: the answer to each record, independent of order, repetition and batching."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tests.stream.scenes import (
    ARMS,
    TOPICS,
    arrival,
    assert_balanced,
    click,
    decisions,
    facts,
    parameters,
    passed,
    reasons,
    serving,
)
from worker.secret import Secret
from worker.stream.catalogue import under
from worker.stream.events import Arrival
from worker.stream.feedback import MOST_PARKED, make_token
from worker.stream.parameters import Parameters, decode_parameters
from worker.stream.serving import Serving, handle_together
from worker.stream.session import Session
from worker.stream.settings import Arm
from worker.stream.slates import Slate, SlatePlanner
from worker.stream.topology import Emits, Record, Tally
from worker.stream.troubles import Troubles
from worker.stream.version_records import encode_parameters
from worker.stream.versions import Versions

SECRET = Secret(b"a secret of enough bytes")


def slate_of(task: Serving, session: str = "s") -> tuple[str, ...]:
    state = task.table[session]
    assert isinstance(state, Session)
    return state.slate


# ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_arrival_is_answered_with_its_whole_slate() -> None:
    emits = serving().handle([arrival()])
    (decision,) = decisions(emits)
    assert decision["position"] == 1
    assert len(decision["slate"]) == 3
    assert decision["arm"] == decision["slate"][0]
    assert decision["mode"] == "explore"
    assert (decision["propensity"], decision["parameters_version"]) == (1.0, 0)
    assert emits.decisions[0][0] == b"s"
    (opened,) = facts(emits)
    assert opened["kind"] == "opened"
    assert opened["slate"] == decision["slate"]
    assert opened["modes"] == ["explore"] * 3


def test_a_pass_brings_the_next_position_and_a_click_ends_the_session() -> None:
    task = serving()
    first = decisions(task.handle([arrival()]))[0]
    second = decisions(task.handle([passed(arm=first["slate"][0])]))[0]
    assert (second["position"], second["slate"]) == (2, first["slate"][1:])
    assert second["value"] < first["value"]
    ended = task.handle([click(position=2, arm=first["slate"][1])])
    assert ended.decisions == []
    assert ended.tally.clicks == {2: 1}
    assert ended.tally.reward == {arm.arm: arm.reward for arm in ARMS}[first["slate"][1]]


def test_a_session_touched_several_times_in_a_batch_is_answered_once() -> None:
    task = serving()
    slate = decisions(serving().handle([arrival()]))[0]["slate"]
    emits = task.handle([arrival(), arrival(), passed(arm=slate[0]), passed(arm=slate[0])])
    assert [decision["position"] for decision in decisions(emits)] == [2]
    assert [fact["kind"] for fact in facts(emits)] == ["opened", "opened", "feedback", "feedback"]
    assert len(emits.changelog) == 1


def test_a_repeated_arrival_is_journaled_and_answered_again_with_the_same_bytes() -> None:
    task = serving()
    first, again = task.handle([arrival()]), task.handle([arrival()])
    assert (again.journal, again.decisions) == (first.journal, first.decisions)
    assert again.changelog == []
    assert again.tally.repeated == 1


def test_without_an_eligible_arm_the_mode_is_none() -> None:
    task = serving()
    (decision,) = decisions(task.handle([arrival(exclude=["cap", "shoe", "coat"])]))
    assert (decision["mode"], decision["arm"], decision["slate"]) == ("none", None, [])
    retired = Parameters.first(parameters().settings, tuple(replace(arm, active=False) for arm in ARMS))
    assert decisions(serving(retired).handle([arrival()]))[0]["mode"] == "none"


def test_the_user_is_known_to_the_planner_and_named_in_no_output(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, users = SlatePlanner.plan, list[str | None]()

    def watched(planner: SlatePlanner, arrivals: Sequence[Arrival], contexts: Sequence[bytes]) -> list[Slate]:
        users.extend(arrival.user_id for arrival in arrivals)
        return plan(planner, arrivals, contexts)

    monkeypatch.setattr(SlatePlanner, "plan", watched)
    task = serving()
    emits = task.handle([arrival(user_id="somebody"), arrival("t")])
    assert users == ["somebody", None]
    for _, value in [*emits.journal, *emits.decisions, *emits.changelog]:
        assert b"somebody" not in (value or b"")
    assert task.handle([arrival(user_id="logged in since")]).tally.repeated == 1


@pytest.mark.parametrize("user", ["", "u" * 129, "a\0b", 7])
def test_the_id_of_a_user_is_a_text_like_the_id_of_a_session(user: object) -> None:
    (letter,) = serving().handle([arrival(user_id=user)]).dead_letters
    assert b"$.user_id" in dict(letter.headers)["adcascade.error"]


@pytest.mark.parametrize("repeats", [True, False])
def test_excluded_arms_are_never_shown(repeats: bool) -> None:
    task = serving(parameters(repeats=repeats))
    (decision,) = decisions(task.handle([arrival(exclude=["coat", "unheard-of"])]))
    assert set(decision["slate"]) <= {"cap", "shoe"}
    assert len(decision["slate"]) == (3 if repeats else 2)


@pytest.mark.parametrize(
    ("changes", "mode"),
    [({"warmup": 1}, "warmup"), ({"random_share": 1.0}, "random"), ({"policy": "random"}, "random")],
)
def test_sessions_drawn_at_random_carry_their_mode_and_propensity(changes: dict[str, Any], mode: str) -> None:
    (decision,) = decisions(serving(parameters(**changes)).handle([arrival()]))
    assert (decision["mode"], decision["propensity"]) == (mode, pytest.approx(1 / 3))
    again = decisions(serving(parameters(**changes)).handle([arrival()]))[0]
    assert again == decision


def test_a_fixed_order_is_served_from_the_first_session_on() -> None:
    first = parameters(policy="fixed", warmup=5, order=("shoe", "coat"), repeats=True)
    assert decode_parameters(encode_parameters(first)).settings == first.settings
    retired, unknown = replace(ARMS[0], active=False), replace(first.settings, order=("hat", "coat"))
    for version, excluded, slate in (
        (first, [], ["shoe", "coat", "cap"]),
        (first, ["coat"], ["shoe", "cap"]),
        (replace(first, arms=(retired, *ARMS[1:]), settings=unknown), [], ["coat", "shoe"]),
    ):
        (decision,) = decisions(serving(version).handle([arrival(exclude=excluded)]))
        assert (decision["slate"], decision["mode"], decision["propensity"]) == (slate, "exploit", 1)


def test_the_random_share_is_the_share_of_sessions_drawn_at_random() -> None:
    task = serving(parameters(random_share=0.25))
    emits = task.handle([arrival(f"s{i}") for i in range(4_000)])
    assert emits.tally.decisions["random"] == pytest.approx(1_000, abs=100)


def test_warm_up_shows_every_arm_at_every_position_equally_often() -> None:
    task = serving(parameters(warmup=1, repeats=True))
    slates = [decision["slate"] for decision in decisions(task.handle([arrival(f"s{i}") for i in range(3_000)]))]
    for position in range(3):
        for arm in ARMS:
            assert sum(slate[position] == arm.arm for slate in slates) == pytest.approx(1_000, abs=100)
    pairs = sum(slate[0] == slate[1] for slate in slates)
    assert pairs == pytest.approx(1_000, abs=100)  # positions are independent


def test_an_unusable_version_still_answers_with_the_highest_paying_ad() -> None:
    broken = parameters()
    huge = replace(broken.model, own=[[-1e308, 1e308, 1e308]] * 3)
    task = serving(replace(broken, model=huge))
    (decision,) = decisions(task.handle([arrival(context=(900.0, -300.0))]))
    assert (decision["mode"], decision["arm"], decision["value"]) == ("fallback", "coat", 0.0)


# ── versions ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_arrival_is_served_by_the_version_in_force_when_it_came() -> None:
    versions = Versions(parameters())
    for number in (1, 2):
        versions.learn(replace(parameters(), version=number, effective_at=number * 10_000))
    task = Serving(versions, topics=TOPICS)
    emits = task.handle([arrival("a", 9_999), arrival("b", 10_000), arrival("c", 25_000)])
    assert [decision["parameters_version"] for decision in decisions(emits)] == [0, 1, 2]


def test_after_eight_versions_the_prior_is_gone_and_the_oldest_known_serves() -> None:
    versions = Versions(parameters())
    for number in range(1, 9):
        versions.learn(replace(parameters(), version=number, effective_at=number * 10_000))
    assert versions.at(0).parameters.version == 1
    assert [known.version for known in versions.history] == list(range(1, 9))


# ── feedback that is early, late, or wrong ───────────────────────────────────────────────────────────────────────────


def test_feedback_before_its_arrival_is_parked_and_then_counts() -> None:
    slate = decisions(serving().handle([arrival()]))[0]["slate"]
    task = serving()
    parked = task.handle([passed(arm=slate[0])])
    assert (parked.decisions, len(parked.journal), task.parked) == ([], 1, 1)
    emits = task.handle([arrival()])
    assert decisions(emits)[0]["position"] == 2
    assert [fact["kind"] for fact in facts(emits)] == ["opened"]  # the feedback is in the journal already
    assert (emits.tally.applied, task.parked) == (1, 0)


def test_only_so_much_feedback_is_parked_for_one_session() -> None:
    task = serving()
    emits = task.handle([passed(at=2_000 + i) for i in range(MOST_PARKED + 2)])
    assert reasons(emits) == ["parked-overflow"] * 2
    assert len(emits.journal) == MOST_PARKED + 2  # the learner may still use it


@pytest.mark.parametrize(
    ("record", "reason", "journaled"),
    [
        (click(position=4), "position", 0),
        (click(arm="unheard-of"), "unknown-arm", 0),
        (click(arm="cap"), "arm-mismatch", 1),
        (arrival(at=1_001), "session-reused", 0),
        (arrival(context=(0.5, -1.1)), "session-reused", 0),
        (arrival(exclude=["cap"]), "session-reused", 0),
    ],
)
def test_a_record_that_does_not_fit_is_a_dead_letter(record: Record, reason: str, journaled: int) -> None:
    task = serving()
    slate = decisions(task.handle([arrival()]))[0]["slate"]
    assert slate[0] == "coat"
    emits = task.handle([record])
    assert reasons(emits) == [reason]
    assert (emits.dead_letters[0].key, emits.dead_letters[0].value) == (record.key, record.value)
    assert len(emits.journal) == journaled


def test_the_headers_of_a_dead_letter_name_its_origin() -> None:
    record = Record(TOPICS.clicks, 5, 77, 0, b"k", b"\xff")
    (letter,) = serving().handle([record]).dead_letters
    headers = dict(letter.headers)
    assert headers["adcascade.topic"] == b"ads.clicks"
    assert (headers["adcascade.partition"], headers["adcascade.offset"]) == (b"5", b"77")
    assert headers["adcascade.reason"] == b"undecodable"
    assert headers["adcascade.error"]


def test_one_bad_record_does_not_disturb_its_neighbours() -> None:
    good = [arrival(f"s{i}") for i in range(10)]
    bad = [Record(TOPICS.arrivals, 0, i, 0, None, value) for i, value in enumerate([b"", b"{}", None, b"[" * 9000])]
    mixed = serving().handle([*bad[:2], *good[:5], *bad[2:], *good[5:]])
    assert mixed.decisions == serving().handle(good).decisions
    assert [letter.value for letter in mixed.dead_letters] == [record.value for record in bad]


@given(st.lists(st.tuples(st.sampled_from([TOPICS.arrivals, TOPICS.clicks]), st.binary(max_size=60)), max_size=8))
def test_no_input_raises_an_error(values: list[tuple[str, bytes]]) -> None:
    task = serving()
    emits = task.handle([Record(topic, 0, i, 0, None, value) for i, (topic, value) in enumerate(values)])
    assert len(emits.dead_letters) == len(values)
    assert_balanced(emits.tally, task)


# ── forgetting ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_value_is_deleted_once_nothing_can_come_for_it() -> None:
    task = serving()
    task.handle([arrival(at=1_000)])
    task.acknowledged(11_999)  # deadline 11,000 + lateness 1,000 is not reached
    assert task.handle([]).changelog == []
    task.acknowledged(13_000)
    emits = task.handle([])
    assert emits.changelog == [(b"s", None)]
    assert (task.table, emits.tally.ended) == ({}, {"expired": 1})


# ── tokens ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_decision_carries_a_token_per_position_and_feedback_must_return_it() -> None:
    task = serving(secret=SECRET)
    (decision,) = decisions(task.handle([arrival()]))
    arms, tokens = decision["slate"], decision["tokens"]
    assert len(tokens) == 3
    (following,) = decisions(task.handle([passed(arm=arms[0], token=tokens[0])]))
    assert following["tokens"] == tokens[1:]
    assert task.handle([click(position=2, arm=arms[1], token=tokens[1])]).tally.applied == 1


@pytest.mark.parametrize(
    "token",
    [
        None,
        "1000.AAAAAAAAAAAAAAAAAAAAAA",
        make_token(SECRET, session_id="other", position=1, arm="coat", arrived_at=1_000),
        make_token(SECRET, session_id="s", position=1, arm="coat", arrived_at=999),
    ],
)
def test_forged_feedback_trains_nothing(token: str | None) -> None:
    task = serving(secret=SECRET)
    task.handle([arrival()])
    assert slate_of(task)[0] == "coat"
    emits = task.handle([click(**({} if token is None else {"token": token}))])
    assert (reasons(emits), emits.journal) == (["token"], [])


# ── the laws ─────────────────────────────────────────────────────────────────────────────────────────────────────────

SLATES = {name: decisions(serving().handle([arrival(name)]))[0]["slate"] for name in ("s", "t", "u")}
arrivals = st.builds(arrival, st.sampled_from(sorted(SLATES)))
answers = st.builds(
    lambda name, position, clicked, at, wrong: click(
        name, at, position, "cap" if wrong else SLATES[name][position - 1], clicked
    ),
    st.sampled_from(sorted(SLATES)),
    st.integers(1, 3),
    st.booleans(),
    st.sampled_from([900, 1_500, 5_000, 11_500]),
    st.booleans(),
)


def run(
    task: Serving, records: list[Record], cuts: list[int]
) -> tuple[Tally, dict[tuple[str, int], bytes], set[bytes]]:
    tally, last, journal = Tally(), {}, set()
    bounds = sorted({0, len(records), *(cut % (len(records) + 1) for cut in cuts)})
    for start, stop in pairwise(bounds):
        emits = task.handle(records[start:stop])
        tally.add(emits.tally)
        journal |= {value for _, value in emits.journal}
        for _, value in emits.decisions:
            decision = orjson.loads(value)
            last[decision["session_id"], decision["position"]] = value
        assert_balanced(tally, task)
    return tally, last, journal


@hypothesis_settings(max_examples=200)
@given(st.lists(st.one_of(arrivals, answers), min_size=1, max_size=12), st.data())
def test_order_repetition_and_batching_do_not_matter(records: list[Record], data: st.DataObject) -> None:
    one, other = serving(), serving()
    _, decided, journal = run(one, records, data.draw(st.lists(st.integers(0, 12), max_size=4)))
    shuffled = data.draw(st.permutations(records + data.draw(st.lists(st.sampled_from(records), max_size=6))))
    _, decided_too, journal_too = run(other, shuffled, data.draw(st.lists(st.integers(0, 18), max_size=4)))
    sessions = {name: state for name, state in one.table.items() if isinstance(state, Session)}
    assert sessions == {name: state for name, state in other.table.items() if isinstance(state, Session)}
    assert journal == journal_too
    assert all(decided_too[key] == value for key, value in decided.items() if key in decided_too)
    for name, state in sessions.items():
        if state.is_open:
            assert decided[name, state.passed + 1] == decided_too[name, state.passed + 1]


@given(st.lists(st.one_of(arrivals, answers), min_size=1, max_size=12), st.data())
def test_a_restart_between_any_two_batches_changes_nothing(records: list[Record], data: st.DataObject) -> None:
    whole, first = serving(), serving()
    expected = whole.handle(records)
    cut = data.draw(st.integers(0, len(records)))
    table: dict[bytes, bytes] = {}
    before = first.handle(records[:cut])
    for key, value in before.changelog:
        assert value is not None
        table[key] = value
    second = serving()
    tally = second.restore(Record(TOPICS.changelog, 0, 0, 0, key, value) for key, value in table.items())
    after = second.handle(records[cut:])
    tally.add(after.tally)
    assert second.table == whole.table
    assert before.journal + after.journal == expected.journal
    assert_balanced(tally, second)


def test_a_shorter_horizon_leaves_the_feedback_of_longer_slates_alone() -> None:
    zero = parameters()
    versions = Versions(zero)
    task = Serving(versions, topics=TOPICS)
    slate = decisions(task.handle([arrival()]))[0]["slate"]
    shorter = under(replace(zero.settings, horizon=2), zero)
    versions.learn(replace(shorter, version=1, effective_at=10**12))
    emits = task.handle([click(position=3, arm=slate[2])])
    assert [fact["kind"] for fact in facts(emits)] == ["feedback"]
    assert emits.tally.clicks == {3: 1}
    assert reasons(task.handle([click(position=4, arm=slate[2])])) == ["position"]


def test_an_arm_priced_anew_keeps_pinned_slates() -> None:
    versions = Versions(parameters())
    task = Serving(versions, topics=TOPICS)
    slate = decisions(task.handle([arrival()]))[0]["slate"]
    dearer = tuple(Arm(arm=arm.arm, reward=100.0 if arm.arm == "cap" else arm.reward) for arm in ARMS)
    versions.learn(replace(Parameters.first(parameters().settings, dearer), version=1))
    assert decisions(task.handle([arrival()]))[0]["slate"] == slate
    assert decisions(task.handle([arrival("new")]))[0]["slate"][0] == "cap"


@st.composite
def polls(draw: st.DrawFn) -> list[list[list[Record]]]:
    """Return what several polls bring to three partitions: sessions that also come twice, anew, and in two of them."""
    sessions = st.sampled_from(["a", "b", "c", "d"])
    contexts = st.sampled_from([(0.5, -1.0), (-2.0, 0.25), (0.0, 3.0)])
    times = st.sampled_from([1_000, 5_000])
    arrivals = st.builds(lambda session, at, context: arrival(session, at, context), sessions, times, contexts)
    answers = st.builds(
        lambda session, position, arm: passed(session, 6_000, position, arm),
        sessions,
        st.integers(1, 3),
        st.sampled_from([arm.arm for arm in ARMS]),
    )
    records = st.lists(arrivals | answers | st.just(arrival()._replace(value=b"?")), max_size=6)
    return draw(st.lists(st.lists(records, min_size=3, max_size=3), max_size=4))


def counted(emits: Emits) -> tuple[Emits, dict[str, int]]:
    reported = {kind: times for kind, times, _ in emits.tally.troubles}
    return replace(emits, tally=replace(emits.tally, troubles=Troubles())), reported


@given(polls())
def test_partitions_handled_together_are_as_if_each_were_handled_alone(drawn: list[list[list[Record]]]) -> None:
    versions = Versions(parameters())
    later = replace(parameters(beta=0.5), version=1, effective_at=4_000)
    versions.learn(later)
    together, alone = ([Serving(versions, topics=TOPICS) for _ in range(3)] for _ in range(2))
    for poll in drawn:
        emitted = handle_together(zip(together, poll, strict=True))
        wanted = [task.handle(records) for task, records in zip(alone, poll, strict=True)]
        tally = Tally()
        for one in wanted:
            tally.add(one.tally)
        # Which of several troubles is the example is left open.
        assert [counted(one) for one in emitted] == [counted(replace(one, tally=tally)) for one in wanted]
    assert [task.table for task in together] == [task.table for task in alone]
