"""The fold over the journal: windows, versions, arms and commands, restart."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from threadpoolctl import threadpool_info

from tests.stream.scenes import ADDITIVE, feedback, opened, progress, window_of_sessions, written
from worker.bandit.additive import AdditiveModel
from worker.bandit.bonuses import explore_budget, restarted
from worker.errors import FailedError
from worker.stream import folding
from worker.stream.catalogue import carry_out, catalogue_difference
from worker.stream.events import (
    ArmChange,
    ArmEntry,
    CatalogueChange,
    Command,
    Import,
    JournalEvent,
    Opened,
    Tag,
    encode_event,
)
from worker.stream.learner import REPUBLISH, Learner, Outcome
from worker.stream.parameters import Parameters, decode_parameters
from worker.stream.settings import Arm, LearningSettings
from worker.stream.slates import SlatePlanner
from worker.stream.version_records import encode_parameters, parameters_document
from worker.stream.versions import RoundedError, should_publish

# Windows of a second; a session lasts 300 ms, disorder 50 ms: the window [0, 1000) is closed when time reaches 1350.
SETTINGS = LearningSettings(dim=2, horizon=3, window=1000, session_timeout=300, lateness=50, warmup=0, **ADDITIVE)
ARMS = (Arm(arm="a", reward=1.0), Arm(arm="b", reward=2.0), Arm(arm="c", reward=3.0))


def session(
    name: str, arrived_at: int, clicked: bool = True, slate: tuple[str, ...] = ("a", "b", "c")
) -> list[JournalEvent]:
    """Return a session that passes over its first arm and answers the second."""
    angle = hash_of(name)
    return [
        opened(name, arrived_at, slate, context=(float(np.cos(angle)), float(np.sin(angle)))),
        feedback(2, slate[1], clicked, arrived_at + 20, name),
    ]


def hash_of(name: str) -> int:
    return sum(index * byte for index, byte in enumerate(name.encode(), 1))


def learner(history: Iterable[Parameters] = (), **changes: Any) -> Learner:
    return Learner(replace(SETTINGS, **changes), ARMS, history)


def learned(*events: JournalEvent, **changes: Any) -> Outcome:
    return learner(**changes).handle(written(events))


def hashes(versions: Iterable[Parameters]) -> list[tuple[int, str]]:
    return [(version.version, version.sha256) for version in versions]


# ── time ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("reports", "watermark"),
    [
        ([], 0),
        ([progress(500)], 500),
        ([progress(500), progress(400)], 500),
        ([progress(500, 0, 2)], 0),
        ([progress(500, 1, 2), progress(300, 0, 2)], 300),
        # More partitions: time waits for the new ones.
        ([progress(500), progress(600, 0, 3)], 0),
        ([progress(500), progress(600, 0, 3), progress(550, 2, 3), progress(700, 1, 3)], 550),
        # A worker with an older number of partitions takes none away.
        ([progress(500, 1, 2), progress(600, 0, 2), progress(900, 0, 1)], 500),
        # A number of partitions that was an error: nobody names it for 1350, and all name another.
        ([progress(500, 0, 50), progress(600, 0, 2), progress(700, 1, 2), progress(2049, 0, 2)], 0),
        ([progress(500, 0, 50), progress(600, 0, 2), progress(700, 1, 2), progress(2050, 0, 2)], 700),
        ([progress(500, 0, 50), progress(600, 0, 2), progress(9000, 0, 2)], 0),
        ([progress(500, 0, 50), progress(600), progress(700, 49, 50), progress(1950), progress(2050)], 0),
        ([progress(500, 0, 50), progress(600), progress(700, 0, 2), progress(1950), progress(2050)], 0),
    ],
)
def test_the_watermark_is_the_lowest_of_the_highest_progress_of_every_partition(reports, watermark) -> None:
    reader = learner()
    reader.handle(written(reports))
    assert reader.watermark.time == watermark


@pytest.mark.parametrize("seed", [0, 1, 2, 14, 19])
def test_a_restart_counts_partitions_as_a_learner_that_runs_on(seed: int) -> None:
    """Numbers of partitions that disagree, orders in between: every restart ends with the same versions."""
    chance = np.random.default_rng(seed)
    events: list[JournalEvent] = []
    for step in range(60):
        at = 250 * step
        count = 3 if chance.random() < 0.08 else 2
        events += session(f"s{step}", at)
        events += [progress(at, partition, count) for partition in range(2) if chance.random() < 0.9]
        if chance.random() < 0.1:
            events.append(ArmChange(arm="a", reward=1.0 + step, active=True))
    journal = written(events)
    reader = learner()
    made = reader.begin().versions + reader.handle(journal).versions
    for known in range(1, len(made) + 1):
        again = learner(made[:known])
        assert hashes(made[:known] + again.handle(journal).versions) == hashes(made)
        assert again.watermark.by_partition() == reader.watermark.by_partition()


@pytest.mark.parametrize(("time", "versions"), [(1349, 0), (1350, 1), (2349, 1), (2350, 2), (9_000, 2)])
def test_a_window_is_closed_when_its_last_session_has_timed_out_and_disorder_is_over(time, versions) -> None:
    outcome = learned(*session("x", 0), *session("y", 999), *session("z", 1000), progress(time))
    assert len(outcome.versions) == len(outcome.episodes) == versions


def test_one_progress_record_closes_several_windows_in_order_each_with_its_own_version() -> None:
    outcome = learned(*session("z", 3500), *session("x", 10), *session("y", 1200), progress(4350))
    assert [(v.folds, v.window_end, v.effective_at, v.resume_offset) for v in outcome.versions] == [
        (1, 1000, 1400, 0),
        (2, 2000, 2400, 0),
        (3, 4000, 4400, 7),
    ]
    assert {(version.journal_offset, version.made_at) for version in outcome.versions} == {(6, 4350)}
    assert [(e.version, e.window_start, e.window_end, e.sessions) for e in outcome.episodes] == [
        (1, 0, 1000, 1),
        (2, 1000, 2000, 1),
        (3, 3000, 4000, 1),
    ]


def test_uncertain_sessions_count_among_the_sessions_and_are_not_learned_from() -> None:
    x, y = session("x", 0), session("y", 10)
    marked = [structs.replace(x[0], uncertain=True), x[1]]
    without, outcome = learned(*y, progress(1350)), learned(*marked, *y, progress(1350))
    (version,), (episode,) = outcome.versions, outcome.episodes
    assert version.model == without.versions[0].model
    assert (version.observations, version.expected_sessions) == (2, 2)
    assert (episode.sessions, episode.displays, episode.clicks) == (2, 2, 1)


@pytest.mark.parametrize(
    "fact", [structs.replace(opened(), uncertain=True), feedback(1, "a", True)], ids=["uncertain", "no session"]
)
def test_a_window_without_certain_sessions_is_closed_without_a_version_and_an_episode(fact: JournalEvent) -> None:
    reader = learner()
    outcome = reader.handle(written([fact, progress(500), progress(1350)]))
    assert (outcome.versions, outcome.episodes) == ([], [])
    assert (reader.windows.closed_until, reader.windows.sessions) == (1000, 0)


def test_a_display_without_an_answer_was_not_clicked_and_the_user_left() -> None:
    (version,) = learned(opened(), progress(1350), answers="learned").versions
    assert (version.folds, version.observations, version.expected_sessions) == (1, 1, 1)
    (passed,) = learned(opened(slate=("a",)), feedback(1, "a", False), progress(1350), answers="learned").versions
    assert (passed.observations, version.model.theta_arms[0]) == (1, passed.model.theta_arms[0])
    assert version.model.theta_arms[0] < 0
    assert version.model.theta_arms[1:].tolist() == [0.0, 0.0]
    assert version.answers is not None
    assert (version.answers.displayed[0].tolist(), version.answers.answered.sum()) == ([1.0, 0.0, 0.0], 0.0)
    (empty,) = learned(opened(slate=(), modes=()), progress(1350)).versions
    assert (empty.folds, empty.observations, empty.kept) == (1, 0, 1.0)
    assert empty.model == Parameters.first(SETTINGS, ARMS).model


def test_late_records_are_counted_and_never_folded() -> None:
    on_time = [*session("x", 10), progress(1350), *session("y", 1100), progress(2350)]
    late = [*session("z", 20), feedback(1, "a", True, occurred_at=999, session_id="y")]
    with_late = learned(*on_time[:3], *late, *on_time[3:])
    assert hashes(with_late.versions) == hashes(learned(*on_time).versions)
    assert with_late.late == 3


def test_where_only_clicks_are_reported_an_unanswered_slate_is_learned_as_passed() -> None:
    (version,) = learned(opened(), progress(1350), unanswered="passed").versions
    assert version.observations == 3
    assert (version.model.theta_arms < 0).all()


# ── the same facts in another order ──────────────────────────────────────────────────────────────────────────────────

FACTS = [event for name in "abcdefghij" for event in session(name, 100 * hash_of(name) % 3000, name < "f")]


@given(st.permutations(FACTS), st.lists(st.sampled_from(FACTS), max_size=8), st.sampled_from([1, 4, 12]))
@settings(max_examples=50)
def test_order_repetition_and_number_of_partitions_leave_every_version_the_same(facts, again, partitions) -> None:
    closing = [progress(4000, partition, partitions) for partition in range(partitions)]
    one, other = learned(*FACTS, progress(4000)), learned(*facts, *again, *closing)
    assert hashes(other.versions) == hashes(one.versions)
    assert other.episodes == one.episodes


def test_records_handled_before_are_passed_over_and_batches_may_be_cut_anywhere() -> None:
    journal = written([*FACTS[:9], progress(1350), *FACTS[9:], progress(4000)])
    whole = learner().handle(journal).versions
    for cut in range(len(journal)):
        reader = learner()
        versions = reader.handle(journal[:cut]).versions
        versions += reader.handle(journal[max(0, cut - 3) :]).versions
        assert [encode_parameters(version) for version in versions] == [encode_parameters(v) for v in whole]


def test_an_unreadable_journal_record_is_reported_and_passed_over() -> None:
    good = written([*session("x", 10), progress(1350)])
    bad = [b"", None, b"{", b"[]", b'{"kind":"unknown"}', b'{"kind":"progress","partition":3,"partitions":2,"time":1}']
    bad.append(encode_event(opened(context=(1.0, 2.0, 3.0))))
    mixed = [*good[:1], *((1 + index, value) for index, value in enumerate(bad)), (8, good[1][1]), (9, good[2][1])]
    outcome = learner().handle(mixed)
    last = "journal offset 7: dimension"
    assert list(outcome.troubles) == [("fold-passed-over", len(bad), last)]
    assert hashes(outcome.versions) == hashes(learner().handle(good).versions)


def test_a_slate_with_unknown_arms_trains_the_known_ones_only() -> None:
    outcome = learned(opened(slate=("a", "ghost")), feedback(2, "ghost", True), progress(1350))
    assert outcome.versions[0].observations == 1
    assert outcome.versions[0].model.theta_arms[0] < 0
    assert outcome.episodes[0].displays == 2


# ── arms ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_new_arm_starts_at_the_prior_and_leaves_the_rest_as_it_is() -> None:
    before, after = learned(*session("x", 10), progress(1350), ArmChange(arm="d", reward=4.0, active=True)).versions
    assert [arm.arm for arm in after.arms] == ["a", "b", "c", "d"]
    assert after.model.theta_arms[3] == 0
    assert after.model.precision.arms[3] == SETTINGS.ridge
    assert np.array_equal(after.model.theta_arms[:3], before.model.theta_arms)
    assert np.array_equal(after.model.precision.cross[:3], before.model.precision.cross)
    assert (after.folds, after.observations, after.thresholds) == (before.folds, before.observations, before.thresholds)
    assert (after.window_end, after.journal_offset, after.resume_offset) == (1000, 3, 4)


def test_a_price_changes_the_reward_alone_and_a_retired_arm_keeps_its_statistics_and_its_index() -> None:
    events = [*session("x", 10), progress(1350), ArmChange(arm="b", reward=9.0, active=True)]
    fold, priced, retired = learned(*events, ArmChange(arm="b", reward=9.0, active=False)).versions
    assert priced.model == retired.model == fold.model
    assert priced.arms[1] == Arm(arm="b", reward=9.0)
    assert retired.arms[1] == Arm(arm="b", reward=9.0, active=False)
    assert [arm.arm for arm in retired.arms] == ["a", "b", "c"]


def entry(arm: str, reward: float, *, active: bool = True) -> ArmEntry:
    return ArmEntry(arm=arm, reward=reward, active=active)


def test_several_changes_of_arms_are_one_version_and_the_same_as_one_by_one() -> None:
    changes = (entry("d", 4.0), entry("b", 9.0), entry("e", 1.0), entry("a", 1.0, active=False))
    together = learned(*session("x", 10), progress(1350), CatalogueChange(changes=changes)).versions
    singly = [ArmChange(arm=one.arm, reward=one.reward, active=one.active) for one in changes]
    apart = learned(*session("x", 10), progress(1350), *singly).versions
    assert [version.version for version in together] == [1, 2]
    assert together[-1].arms == apart[-1].arms
    assert together[-1].model == apart[-1].model


@pytest.mark.parametrize(
    "order",
    [
        ArmChange(arm="ghost", reward=1.0, active=False),
        CatalogueChange(changes=(entry("d", 4.0), entry("ghost", 1.0, active=False))),
    ],
    ids=["alone", "one of several"],
)
def test_an_order_that_retires_an_unknown_arm_is_refused_as_a_whole(order: ArmChange | CatalogueChange) -> None:
    outcome = learned(order)
    assert not outcome.versions
    assert outcome.refusals[0].reason == "arm 'ghost' cannot be retired: it is not known"


arms_by_id = st.dictionaries(st.sampled_from("abcdef"), st.tuples(st.sampled_from((1.0, 2.0)), st.booleans()))
catalogues = arms_by_id.map(lambda by_id: {arm: Arm(arm=arm, reward=r, active=on) for arm, (r, on) in by_id.items()})


@given(have=catalogues, want=catalogues)
def test_the_difference_makes_one_catalogue_equal_to_another(have: dict[str, Arm], want: dict[str, Arm]) -> None:
    """Afterwards the active arms are those of the wanted one, at its rewards; a second time nothing is left to do."""
    current = Parameters.first(SETTINGS, tuple(have.values()))
    order = CatalogueChange(changes=catalogue_difference(current.arms, tuple(want.values())))
    after = carry_out(current, order, {}) or current
    assert isinstance(after, Parameters)
    assert {arm for arm in after.arms if arm.active} == {arm for arm in want.values() if arm.active}
    assert [arm.arm for arm in after.arms[: len(have)]] == list(have)
    assert catalogue_difference(after.arms, tuple(want.values())) == ()
    assert (carry_out(current, order, {}) is None) == (order.changes == ())


def test_an_order_that_changes_nothing_makes_no_version() -> None:
    change = ArmChange(arm="d", reward=4.0, active=True)
    orders = [change, change, Command(action="unfreeze"), Command(action="freeze"), Command(action="freeze"), change]
    outcome = learned(*orders, Command(action="rollback", version=2))
    assert [version.version for version in outcome.versions] == [1, 2]
    assert not outcome.refusals


def test_orders_take_effect_after_current_sessions_and_never_before_the_parent() -> None:
    order, again = ArmChange(arm="d", reward=1.0, active=True), Command(action="freeze")
    assert learned(order).versions[0].effective_at == 0
    assert learned(progress(700, 1, 2), order).versions[0].effective_at == 800
    fold, version = learned(*session("x", 10), progress(1350), again).versions
    assert (fold.effective_at, version.effective_at) == (1400, 1450)
    fold, version = learned(*session("x", 10), progress(1350), again, lateness=20).versions
    assert version.effective_at == 1390
    # Under a long session timeout the parent may still wait for its time.
    fold, version = learned(*session("x", 990), progress(1350), again, session_timeout=0, lateness=300).versions
    assert (fold.effective_at, version.effective_at) == (1600, 1950)


# ── commands ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_frozen_windows_close_without_a_version_and_are_marked() -> None:
    events = [Command(action="freeze"), *session("x", 10), progress(1350), *session("y", 1100), progress(2350)]
    outcome = learned(*events, Command(action="unfreeze"), *session("z", 2100), progress(3350))
    assert [(version.version, version.frozen, version.folds) for version in outcome.versions] == [
        (1, True, 0),
        (2, False, 0),
        (3, False, 1),
    ]
    assert [(episode.version, episode.frozen, episode.sessions) for episode in outcome.episodes] == [
        (1, True, 1),
        (1, True, 1),
        (3, False, 1),
    ]
    assert outcome.versions[1].window_end == 2000


def test_a_rollback_brings_back_the_estimate_under_the_arms_position_and_state_of_now() -> None:
    events = [*session("x", 10), progress(1350), *session("y", 1100, clicked=False), progress(2350)]
    events += [ArmChange(arm="d", reward=4.0, active=True), Command(action="freeze")]
    one, _, _, frozen, back = learned(*events, Command(action="rollback", version=1)).versions
    assert np.array_equal(back.model.theta_arms, [*one.model.theta_arms, 0])
    assert np.array_equal(back.model.precision.context, one.model.precision.context)
    assert (back.folds, back.observations, back.expected_sessions) == (1, 2, 1)
    assert (back.arms, back.frozen, back.window_end) == (frozen.arms, True, 2000)
    assert (back.version, back.parent_sha256) == (5, frozen.sha256)


@pytest.mark.parametrize(("target", "possible"), [(0, False), (1, False), (2, True), (4, True), (10, False)])
def test_a_rollback_reaches_the_last_eight_versions_only(target, possible) -> None:
    prices = [ArmChange(arm="a", reward=2.0 + step, active=True) for step in range(4)]
    folds = [event for at in (10, 1010, 2010, 3010, 4010) for event in (*session("x", at), progress(at + 1400))]
    outcome = learned(*folds, *prices, Command(action="rollback", version=target))  # versions 1 to 9
    assert len(outcome.versions) == 9 + possible
    assert len(outcome.refusals) == 1 - possible
    if not possible:
        assert outcome.refusals[0].reason == f"version {target} is not among the last 8 (2 to 9)"


# ── versions from elsewhere ──────────────────────────────────────────────────────────────────────────────────────────


def elsewhere(**changes: Any) -> Parameters:
    """Return a version that learned about the arms d, c and a."""
    arms = tuple(Arm(arm=name, reward=9.0, active=name != "d") for name in "dca")
    given = Learner(replace(SETTINGS, **changes), arms)
    events = [*session("x", 10, slate=("d", "c", "a")), *session("y", 20, slate=("c", "d", "a")), progress(1350)]
    (made,) = given.handle(written(events)).versions
    return made


@pytest.mark.parametrize("arms", [True, False])
def test_an_import_takes_the_estimate_by_arm_and_nothing_else(arms: bool) -> None:
    given = elsewhere()
    before = [*session("z", 10), progress(1350), Command(action="freeze")]
    *_, frozen, made = learned(*before, Import(parameters=parameters_document(given), arms=arms)).versions
    d, c, a = given.model.biases
    assert list(made.model.biases) == ([a, 0.0, c, d] if arms else [a, 0.0, c])
    assert made.arms == ((*ARMS, given.arms[0]) if arms else ARMS)
    widths = made.model.widths(np.zeros((1, made.model.dim)))[0]
    assert np.allclose(widths[[0, 2]], given.model.widths(np.zeros((1, given.model.dim)))[0][[2, 1]])
    assert widths[1] == pytest.approx(SETTINGS.ridge**-0.5, rel=0.5), "the prior"
    assert (made.observations, made.folds, made.frozen) == (given.observations, given.folds, True)
    assert (made.version, made.parent_sha256) == (frozen.version + 1, frozen.sha256)
    assert (made.window_end, made.settings) == (frozen.window_end, frozen.settings)


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        ({}, "these parameters cannot be used: there is no sha256"),
        (parameters_document(elsewhere()) | {"observations": 1}, "does not fit its content"),
        (parameters_document(Parameters.first(replace(SETTINGS, dim=5), ARMS)), "have dim 5, the present ones 2"),
    ],
    ids=["empty", "damaged", "dim"],
)
def test_an_import_that_does_not_fit_is_refused_with_a_reason(document: dict[str, Any], reason: str) -> None:
    outcome = learned(Import(parameters=document, arms=True))
    assert not outcome.versions
    assert reason in outcome.refusals[0].reason
    too_long = learner().handle([(0, b'{"kind":"import","arms":true,"parameters":{"version":%d}}' % 2**70)])
    assert (too_long.versions, bool(too_long.troubles)) == ([], True)


def test_learners_that_are_restarted_around_imports_and_tags_agree() -> None:
    first = [*session("x", 10), progress(1350), *session("y", 1100, clicked=False), progress(2350)]
    old = learned(*first).versions[0]
    prices = [ArmChange(arm="a", reward=2.0 + step, active=True) for step in range(9)]
    orders = [Import(parameters=parameters_document(one), arms=True) for one in (old, elsewhere())]
    middle = [*prices, orders[0], Tag(name="good", version=1), *session("z", 2400), orders[1], orders[1]]
    last = [progress(3350), Tag(name="good", version=None), Command(action="rollback", version=13)]
    journal = written([*first, *middle, *last])
    outcome = learner().handle(journal)
    assert [tag.version for _, tag in outcome.tags] == [1, None]
    versions = [Parameters.first(SETTINGS, ARMS), *outcome.versions]
    assert versions[12].model == old.model, "no longer among the last eight"
    assert len(versions) == 16
    for index in range(len(versions)):
        again = learner(versions[max(0, index - 7) : index + 1])
        made = again.handle(journal[again.resume_offset :])
        assert list(map(encode_parameters, made.versions)) == list(map(encode_parameters, versions[index + 1 :]))
        later = [tag for tag in outcome.tags if tag[0] > versions[index].journal_offset]
        assert made.tags == later, "a tag is read again unless a version was made after it"


# ── the gate ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_fold_without_a_usable_estimate_is_rejected_and_the_next_window_goes_on() -> None:
    broken = [opened("x", 10, context=(1e200, 1e200)), feedback(1, "a", True, 20, "x")]
    outcome = learned(*broken, progress(1350), *session("y", 1100), progress(2350))
    rejected, fine = outcome.episodes
    assert rejected.rejected
    assert (rejected.version, fine.version, fine.rejected) == (0, 1, None)
    assert hashes(outcome.versions) == hashes(learned(*session("y", 1100), progress(2350)).versions)
    encode_event(rejected)


def test_numbers_that_are_not_finite_do_not_pass_the_gate(monkeypatch) -> None:
    monkeypatch.setattr(folding, "score_of_rank", lambda *_: (float("inf"), 1.0))
    sessions = [event for name in "uvwxyz" for event in session(name, 10)]
    outcome = learned(*sessions, progress(1350), policy="aucbbp", horizon_episodes=2)
    assert not outcome.versions
    assert outcome.episodes[0].rejected == "a threshold is not finite"


CONTEXTS = st.one_of(
    st.tuples(st.floats(-1e300, 1e300), st.floats(-1e300, 1e300)),
    st.tuples(st.floats(-1e3, 1e3), st.floats(-1e3, 1e3)),
    st.sampled_from([(0.0, 0.0), (1.0, 1.0), (5e-324, -5e-324), (1e-300, 1e300), (1.0, 2.0)]),
)


@given(
    st.lists(st.tuples(CONTEXTS, st.integers(1, 3), st.booleans()), min_size=1, max_size=12),
    st.sampled_from(["laplace", "newton", "paper"]),
    st.sampled_from(["ucbbp", "aucbbp"]),
    st.sampled_from([1.0, 0.5, 1e-9]),
)
@settings(max_examples=150, deadline=None)
def test_every_version_is_finite_and_positive_definite(sessions, estimator, policy, forgetting) -> None:
    events: list[JournalEvent] = []
    for number, (context, position, clicked) in enumerate(sessions):
        name, at = f"s{number}", 300 * number
        events.append(opened(name, at, context=context))
        events.append(feedback(position, "abc"[position - 1], clicked, at + 5, name))
    outcome = learned(*events, progress(9000), estimator=estimator, policy=policy, forgetting=forgetting)
    assert len(outcome.episodes) == len({300 * number // 1000 for number in range(len(sessions))})
    for version in outcome.versions:
        again = decode_parameters(encode_parameters(version))  # checks hash, finiteness and definiteness
        assert again == version
        assert np.isfinite(version.thresholds).all()
    for episode in outcome.episodes:
        assert bool(episode.rejected) != (episode.window_end in {version.window_end for version in outcome.versions})
        encode_event(episode)  # refuses what is not finite


# ── restart ──────────────────────────────────────────────────────────────────────────────────────────────────────────

STORY: Sequence[JournalEvent] = [
    *session("x", 10),
    *session("y", 1900),
    opened("late", 400),
    progress(900, 0, 2),
    progress(1400, 1, 2),
    feedback(1, "a", False, 420, "late"),
    ArmChange(arm="d", reward=2.5, active=True),
    progress(3400, 0, 2),  # still held back by partition 1
    *session("w", 2500, slate=("d", "a", "b")),
    *session("v", 1500),
    progress(3500, 1, 2),  # closes two windows
    *session("late", 100),
    Command(action="freeze"),
    *session("u", 3200),
    progress(4500, 0, 2),
    progress(4400, 1, 2),
    Command(action="rollback", version=1),
    Command(action="unfreeze"),
    CatalogueChange(changes=(ArmEntry(arm="e", reward=2.0, active=True), ArmEntry(arm="c", reward=1.5, active=True))),
    *session("t", 4600),
    *session("s", 5600),
    *session("r", 4610),
    progress(6000, 1, 2),
    progress(5990, 0, 2),
    Command(action="rollback", version=99),
    progress(9990, 0, 2),
    progress(9990, 1, 2),
]


def test_a_learner_restarted_at_any_version_makes_the_same_versions_byte_for_byte() -> None:
    journal = written(STORY)
    fresh = learner()
    versions = fresh.begin().versions + fresh.handle(journal).versions
    assert len(versions) == 11
    assert versions[2].resume_offset < versions[2].journal_offset, "an order that is read again, and not obeyed twice"
    for index in range(len(versions)):
        again = learner(versions[: index + 1])
        again.check_start(0, len(journal))
        made = again.handle(journal[again.resume_offset :]).versions
        assert list(map(encode_parameters, made)) == list(map(encode_parameters, versions[index + 1 :]))
        assert again.current == fresh.current
        assert not again.begin().versions


def test_a_version_records_a_partition_without_progress_as_zero() -> None:
    journal = written([progress(2000, 0, 2), *session("x", 10), Command(action="freeze"), Command(action="unfreeze")])
    *_, version = learner().handle(journal).versions
    assert version.progress == {0: 2000, 1: 0}
    again = learner([version])
    assert not again.handle(journal).episodes
    assert again.watermark.time == 0


def test_after_ten_windows_without_a_version_the_newest_is_published_again_from_its_newer_position() -> None:
    idle = [progress(1350 + 1000 * step) for step in range(1, 25)]
    journal = written([*session("x", 10), progress(1350), *idle])
    outcome = learner().handle(journal)
    first, again, once_more = outcome.versions
    assert [version.version for version in outcome.versions] == [1, 1, 1]
    assert hashes([again, once_more]) == hashes([first, first])
    assert (again.effective_at, again.made_at) == (first.effective_at, first.made_at)
    assert again.window_end == first.window_end + REPUBLISH * 1000
    assert again.journal_offset == again.resume_offset - 1 > first.journal_offset
    assert learner([first, again]).resume_offset == again.resume_offset
    assert [encode_parameters(v) for v in learner([again]).handle(journal).versions] == [encode_parameters(once_more)]


@pytest.mark.parametrize("why", ["frozen", "rejected"])
def test_a_long_time_frozen_or_rejected_also_moves_the_position(why) -> None:
    events: list[JournalEvent] = [Command(action="freeze")] if why == "frozen" else []
    for step in range(1, 13):
        context = (1.0, 1.0) if why == "frozen" else (1e200, 1e200)
        events += [opened("x", 1000 * step, context=context), feedback(1, "a", True, 1000 * step + 9, "x")]
        events.append(progress(1000 * step + 1400))
    journal = written([*events, Command(action="unfreeze"), *session("y", 14_000), progress(16_000)])
    versions = learner().handle(journal).versions
    republished = [v for v in versions if v.resume_offset > 10]
    assert republished
    again = learner([republished[0]])
    assert hashes(again.handle(journal[again.resume_offset :]).versions)[-1] == hashes(versions)[-1]


def test_a_journal_that_was_trimmed_or_replaced_is_an_error() -> None:
    versions = learner().handle(written([*session("x", 10), *session("y", 1100), progress(1350)])).versions
    again = learner(versions)
    again.check_start(2, 5)
    with pytest.raises(FailedError, match="begins at offset 3, but version 1 needs it from 2: it was trimmed"):
        again.check_start(3)
    with pytest.raises(FailedError, match="ends at offset 4, but version 1 was made at 4"):
        again.check_start(0, 4)
    with pytest.raises(FailedError, match="begins at offset 1, but version 0 needs it from 0"):
        learner().check_start(1)


def test_a_version_missing_among_the_last_eight_is_made_again_so_that_a_rollback_reaches_it() -> None:
    prices = [event for at in range(5) for event in (*session("x", 1000 * at), progress(1000 * at + 1350))]
    journal = written([*prices, Command(action="rollback", version=3)])
    versions = learner().begin().versions + learner().handle(journal).versions
    *known, rolled = versions
    again = learner([version for version in known if version.version != 3])
    again.check_start(0)
    assert hashes(again.handle(journal).versions) == hashes([rolled])
    # If the journal begins later, the learner resumes from the newest version.
    trimmed = learner([version for version in known if version.version != 3])
    trimmed.check_start(known[-1].resume_offset)
    assert trimmed.current.version == 5
    assert trimmed.handle(journal[known[-1].resume_offset :]).refusals


def test_a_version_that_differs_from_the_published_one_is_an_error() -> None:
    journal = written([event for at in range(4) for event in (*session("x", 1000 * at), progress(1000 * at + 1350))])
    zero, one, two, three, four = learner().begin().versions + learner().handle(journal).versions
    forged = replace(three, observations=99)
    with pytest.raises(FailedError, match=r"version 3 with sha256 .* two learners disagree"):
        learner([zero, one, forged, four]).handle(journal)
    with pytest.raises(FailedError, match=r"version 3 .* two learners disagree"):
        learner([two, three, forged])


def test_versions_of_another_kind_of_machine_are_adopted() -> None:
    journal = written([event for at in range(4) for event in (*session("x", 1000 * at), progress(1000 * at + 1350))])
    zero, one, _two, three, four = learner().begin().versions + learner().handle(journal).versions
    rounded = replace(three, model=three.model.shifted(0, 1e-12))
    assert rounded.sha256 != three.sha256
    resumed = learner([zero, one, rounded, rounded, four])  # version 2 is missing, so it makes all from there again
    made = resumed.handle(journal).versions
    assert made == []
    assert resumed.current.sha256 == four.sha256
    events = [*session("y", 4000), progress(5350)]
    assert resumed.handle(written(events, len(journal))).versions[-1].parent_sha256 == four.sha256
    with pytest.raises(FailedError, match=r"version 3 .* two learners disagree"):
        learner([zero, one, replace(three, model=three.model.shifted(0, 1e-7)), four]).handle(journal)


@pytest.mark.parametrize(
    ("newest", "answer"),
    [
        (None, True),
        ({"version": 4}, True),
        ({"version": 6}, False),
        ({}, False),
        ({"journal_offset": 10}, True),
        ({"journal_offset": 99}, False),
        ({"observations": 1}, FailedError),
        ({"thresholds": (1e-12, 0.0, 0.0)}, RoundedError),
    ],
)
def test_a_version_is_published_once_and_again_only_from_a_newer_position(newest, answer) -> None:
    candidate = replace(Parameters.first(SETTINGS, ARMS), version=5, journal_offset=50)
    there = None if newest is None else replace(candidate, **newest)
    if answer in (FailedError, RoundedError):
        text = "two learners disagree" if answer is FailedError else "only by rounding"
        with pytest.raises(answer, match=f"version 5 .* {text}"):
            should_publish(candidate, there)
    else:
        assert should_publish(candidate, there) is answer


# ── settings that change ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "changes",
    [{"horizon": 5}, {"horizon": 1}, {"window": 700}, {"session_timeout": 900, "lateness": 0}, {"policy": "aucbbp"}],
)
def test_new_settings_hold_from_the_next_version_on_and_the_journal_can_be_folded_again_under_both(changes) -> None:
    journal = written(STORY)
    before = learner().begin().versions + learner().handle(journal[:13]).versions
    assert len(before) == 3
    after = learner(before, **changes).handle(journal[learner(before).resume_offset :]).versions
    assert {version.settings for version in after} == {replace(SETTINGS, **changes)}
    made_under = {version.version: version.settings for version in [*before, *after]}
    again = Learner(SETTINGS, ARMS, before[:1], made_under=made_under, with_episodes=False)
    outcome = again.handle(journal)
    assert hashes(outcome.versions) == hashes([*before[1:], *after])
    assert not outcome.episodes


# ── how much to explore ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "changes", [{}, {"repeats": False}, {"random_share": 0.4}], ids=["repeats", "no repeats", "random share"]
)
def test_active_exploration_keeps_to_its_budget_within_five_percent(changes) -> None:
    generator = np.random.default_rng(7)
    d, K, N, T = 4, 8, 150, 40
    arms = [Arm(arm=f"k{k}", reward=float(e)) for k, e in enumerate(generator.uniform(0.5, 1, K))]
    theta, biases = (
        generator.normal(size=d) / 2,
        dict(zip((a.arm for a in arms), generator.normal(size=K), strict=True)),
    )
    options = replace(
        SETTINGS, dim=d, horizon=4, policy="aucbbp", warmup=1, horizon_episodes=3000, window=6000, **changes
    )
    reader = Learner(options, arms)
    explored, budget, offset = 0.0, 0.0, 0
    for t in range(T):
        current = reader.current
        if t >= options.warmup:
            budget += min(explore_budget(N, t + 1, options.horizon_episodes), N * (1 - options.random_share))
        events = window_of_sessions(
            SlatePlanner(current),
            generator.normal(size=(N, d)),
            6000 * t,
            lambda arm, x: bool(generator.random() < 1 / (1 + np.exp(-x @ theta - biases[arm]))),
        )
        closing = progress(6000 * (t + 1) + 350)
        outcome = reader.handle(written([*events, closing], offset))
        offset += len(events) + 1
        assert reader.current.explore_budget == explore_budget(N, t + 2, options.horizon_episodes)
        explored += outcome.episodes[0].explored
    assert budget > 500
    assert abs(explored / budget - 1) <= 0.05


def test_thresholds_are_the_scores_of_the_rank_that_the_budget_allows() -> None:
    generator = np.random.default_rng(1)
    reader = learner(policy="aucbbp", horizon_episodes=3)
    events = window_of_sessions(SlatePlanner(reader.current), generator.normal(size=(100, 2)), 0, lambda *_: False)
    (version,) = reader.handle(written([*events, progress(1350)])).versions
    assert version.expected_sessions == 100
    assert version.explore_budget == explore_budget(100, 2, 3) == 16
    planner = version.planner()
    assert planner is not None
    plans = sorted((event.session_id, event.context) for event in events if isinstance(event, Opened))
    contexts = np.array([context for _, context in plans])
    policy = folding.Ucbbp(beta=version.settings.beta, bonus=folding.BONUSES["value"], spread=version.settings.spread)
    slates = policy.slates(planner, contexts, keys=np.arange(100, dtype=np.uint32))
    scores = folding.exploration_scores(planner, contexts, slates.arms)
    assert [(scores[:, h] >= version.thresholds[h]).sum() for h in range(3)] == [16, 16, 16]


@given(st.lists(st.sampled_from([0.5, 1.0, 2.0, 3.5]), min_size=1), st.floats(0, 60))
def test_a_threshold_and_its_tie_select_as_many_as_the_rank_says(scores: list[float], rank: float) -> None:
    falling = np.array(sorted(scores, reverse=True))
    threshold, tie = folding.score_of_rank(np.array(scores), rank)
    selected = (falling > threshold).sum() + tie * (falling == threshold).sum()
    if threshold in scores:
        assert selected == pytest.approx(min(max(rank, 1), len(scores)))
    else:  # between two ranks
        assert falling[int(rank) - 1] > threshold > falling[int(rank)]
        assert selected == int(rank)


def test_a_window_too_large_to_score_wholly_is_sampled(monkeypatch) -> None:
    generator = np.random.default_rng(2)
    events = window_of_sessions(SlatePlanner(learner().current), generator.normal(size=(1000, 2)), 0, lambda *_: False)
    changes: dict[str, Any] = {"policy": "aucbbp", "horizon_episodes": 5}
    (whole,) = learned(*events, progress(1350), **changes).versions
    monkeypatch.setattr(folding, "MOST_SCORED", 0)
    monkeypatch.setattr(folding, "LEAST_SCORED", 400)
    (sampled,) = learned(*events, progress(1350), **changes).versions
    assert sampled.thresholds != whole.thresholds
    assert np.allclose(sampled.thresholds, whole.thresholds, rtol=0.05)


def test_other_policies_and_the_first_version_set_no_thresholds() -> None:
    assert learner(policy="aucbbp").begin().versions[0].thresholds == (0.0, 0.0, 0.0)
    assert learned(*session("x", 10), progress(1350)).versions[0].thresholds == (0.0, 0.0, 0.0)


def test_a_fixed_forgetting_fades_the_estimate_and_the_counts_before_each_fold() -> None:
    events = [*session("x", 10), progress(1350), opened("y", 1100, ("c",)), progress(2350)]
    one, two = learned(*events, forgetting=0.5, answers="learned").versions
    faded = one.model.forget(0.5)
    assert np.allclose(two.model.precision.arms[:2], faded.precision.arms[:2])
    assert (two.kept, two.observations) == (0.5, one.observations + 1)
    assert two.answers.displayed[:, :2].tolist() == (one.answers.displayed[:, :2] / 2).tolist()
    assert two.clock == restarted(2.0, 0.5, SETTINGS.horizon_episodes)


def test_a_fold_runs_in_one_blas_thread_whatever_the_caller_has_set(monkeypatch) -> None:
    seen = []

    def fold(*arguments: Any, **options: Any) -> Any:
        seen.extend(pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas")
        return real(*arguments, **options)

    real = AdditiveModel.fold
    monkeypatch.setattr(AdditiveModel, "fold", fold)
    learned(*session("x", 10), progress(1350))
    assert seen
    assert set(seen) == {1}


# ── episodes ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_episode_has_the_revenue_of_its_window_and_the_expected_one() -> None:
    events = [
        opened("x", 10, modes=("explore", "exploit", "explore")),
        feedback(3, "c", True, 20, "x"),
        opened("y", 20, modes=("warmup",) * 3),
        feedback(1, "a", False, 30, "y"),
        opened("z", 30, slate=(), modes=()),
    ]
    (episode,) = learned(*events, progress(1350)).episodes
    assert (episode.sessions, episode.displays, episode.clicks, episode.reward) == (3, 4, 1, 3.0)
    # Under the prior every probability is one half: 1/2·1 + 1/4·2 + 1/8·3, for each of the two with a slate.
    assert episode.expected_reward == pytest.approx(2 * (0.5 + 0.5 + 0.375))
    assert episode.explored == pytest.approx(2 / 3)
    assert (episode.frozen, episode.rejected) == (False, None)
    assert episode.regret_bound is not None
    assert episode.regret_posterior is not None
    assert episode.regret_bound > episode.regret_posterior > 0


def test_prices_are_those_of_the_version_that_window_of_sessions() -> None:
    dearer = ArmChange(arm="a", reward=10.0, active=True)
    before = [opened("x", 10, parameters_version=0), feedback(1, "a", True, 20, "x")]
    after = [opened("y", 30, parameters_version=1), feedback(1, "a", True, 40, "y")]
    (episode,) = learned(dearer, *before, *after, progress(1350)).episodes
    assert episode.reward == 11.0
    unknown = [opened("x", 10, parameters_version=77), feedback(1, "a", True, 20, "x")]
    assert learned(dearer, *unknown, progress(1350)).episodes[0].reward == 10.0


def test_where_no_arm_can_be_shown_there_is_no_regret_and_learning_goes_on() -> None:
    retire = [ArmChange(arm=arm.arm, reward=arm.reward, active=False) for arm in ARMS]
    events = [*retire, opened(slate=()), progress(1350)]
    outcome = learned(*events, policy="aucbbp")
    (episode,) = outcome.episodes
    assert (episode.regret_bound, episode.regret_posterior) == (None, None)
    assert outcome.versions[-1].folds == 1
    nothing = Learner(SETTINGS, ()).handle(written([opened(slate=()), progress(1350)]))
    assert nothing.versions[0].folds == 1
    assert nothing.episodes[0].expected_reward == 0
