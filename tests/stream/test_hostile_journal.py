"""Whatever is in the journal, the learner goes on, and a learner that is restarted at every point agrees with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import worker.stream.folding as folding
import worker.stream.learner as learner_module
import worker.stream.windows as windows_module
from tests.stream.scenes import feedback, opened, progress, written
from worker.bandit.personal import PersonalModel
from worker.errors import InputError
from worker.stream import version_sizes
from worker.stream.accounts import ROWS, Accounts, Sums
from worker.stream.calibration import Calibration
from worker.stream.events import (
    MOST,
    ArmChange,
    ArmEntry,
    CatalogueChange,
    Command,
    Import,
    JournalEvent,
    Progress,
    Tag,
    encode_event,
)
from worker.stream.learner import Learner, Outcome
from worker.stream.misfit import Misfit
from worker.stream.parameters import Parameters, decode_parameters
from worker.stream.settings import Arm, LearningSettings
from worker.stream.version_records import encode_parameters
from worker.stream.versions import keep

SETTINGS = LearningSettings(dim=2, horizon=3, window=100, session_timeout=60, lateness=10, warmup=0, standardise=False)
ARMS = (Arm(arm="a", reward=1.0), Arm(arm="b", reward=2.0), Arm(arm="c", reward=3.0))
LARGE = (0.0, 1.0, -1.0, 1e-300, 1e154, -1e300, 1.7976931348623157e308)
Journal = Sequence[tuple[int, bytes | None]]
TIMES = (0, 1, 99, 100, MOST - 1, MOST)


def absurd(random: Random) -> bytes | None:
    """Return a journal record that decodes, or nearly does, and makes no sense."""
    time = random.choice((*TIMES, *(random.randint(0, 2_000) for _ in range(20))))
    name, arm = f"s{random.randint(0, 9)}", random.choice("abcdefgh")
    number = random.choice((*LARGE, random.gauss(0, 1), random.gauss(0, 1)))
    slate = tuple(random.choice("abcxyz") for _ in range(random.choice((0, 1, 3, 3, 3, 40))))
    position = random.choice((1, 2, 3, MOST))
    partitions = random.choice((1, 1, 1, 2, 3))
    reward = random.choice((1.0, 2.5, 5e-324, 1e308))
    active = random.random() < 0.6
    entries = tuple(ArmEntry(arm=one, reward=reward, active=active) for one in (arm, "a"))
    imported = replace(
        Parameters.first(SETTINGS, tuple(Arm(arm=one, reward=2.5) for one in random.sample("abcdef", 4))),
        folds=random.choice((0, 3, -5, MOST, 2**63 - 1)),
        observations=random.choice((0, 2**63 - 1)),
        model=replace(
            PersonalModel.prior(dim=2, arms=4, ridge=random.choice((1.0, 1e-300, 1e300))),
            own=np.outer([0.0, 1.0, number, 2.0], [1.0, number and 1.0, 0.0]),
        ),
    )
    records: tuple[Callable[[], bytes | None], ...] = (
        *[lambda: encode_event(opened(name, time, slate, context=(number, random.gauss(0, 1))))] * 4,
        *[lambda: encode_event(feedback(position, arm, random.random() < 0.5, time, name))] * 4,
        *[lambda: encode_event(Progress(partition=random.randrange(partitions), partitions=partitions, time=time))] * 3,
        lambda: encode_event(opened(name, time, slate, context=(number, 1.0), uncertain=True)),
        lambda: encode_event(opened(name, time, slate, context=(number,) * random.choice((0, 1, 3, 500)))),
        lambda: encode_event(ArmChange(arm=arm, reward=reward, active=active)),
        lambda: encode_event(CatalogueChange(changes=entries)),
        lambda: encode_event(Command(action=random.choice(("freeze", "unfreeze")))),
        lambda: encode_event(Command(action="rollback", version=random.choice((0, 1, 2, 3, 9, MOST)))),
        lambda: encode_event(Import(parameters=orjson.loads(encode_parameters(imported)), arms=active)),
        lambda: encode_event(Tag(name="t", version=random.choice((None, 0, MOST)))),
        lambda: random.randbytes(random.choice((0, 3, 40))),
        lambda: None,
        lambda: orjson.dumps({"kind": "opened", "context": None, "arrived_at": -5, "slate": "abc"}),
        lambda: b'{"kind":"opened","session_id":"s","arrived_at":NaN,"context":[NaN,1e999],"slate":[],"modes":[]}',
    )
    return random.choice(records)()


def journals(seed: int) -> list[tuple[int, bytes | None]]:
    random = Random(seed)
    records = [absurd(random) for _ in range(random.choice((5, 60)))]
    # Two regular windows at the end: learning goes on.
    for at in (3_000, 3_100):
        records += [encode_event(opened(f"u{at}{n}", at + n)) for n in range(4)]
        records += [encode_event(feedback(2, "b", n % 2 == 0, at + n + 5, f"u{at}{n}")) for n in range(4)]
    records += [encode_event(Progress(partition=n, partitions=3, time=4_000)) for n in range(3)]
    return list(enumerate(records))


def folded(journal: Journal, **changes: Any) -> tuple[Outcome, Learner]:
    learner = Learner(replace(SETTINGS, **changes), ARMS)
    first = learner.begin().versions
    outcome = learner.handle(journal)
    outcome.versions[:0] = first
    return outcome, learner


def restarted(journal: Journal, every: int, **changes: Any) -> dict[int, Parameters]:
    """Fold with a new learner for every few records, each from what was published; return all versions."""
    kept: dict[int, Parameters] = {}
    made: dict[int, Parameters] = {}

    def publish(outcome: Outcome) -> None:
        nonlocal kept
        for version in outcome.versions:
            again = decode_parameters(encode_parameters(version))
            assert made.setdefault(again.version, again).sha256 == again.sha256
            kept = keep(kept, again)
        for episode in outcome.episodes:
            encode_event(episode)

    for end in range(every, len(journal) + every, every):
        learner = Learner(replace(SETTINGS, **changes), ARMS, kept.values())
        publish(learner.begin())
        learner.check_start(0, len(journal))
        publish(learner.handle(journal[learner.resume_offset : end]))
    return made


@settings(max_examples=25, deadline=None, print_blob=True)
@given(
    st.integers(0, 2**32),
    st.integers(1, 40),
    st.fixed_dictionaries(
        {
            "policy": st.sampled_from(["ucbbp", "aucbbp"]),
            "forgetting": st.sampled_from([1.0, 0.9, "auto"]),
            "spread": st.sampled_from([0.0, 1.0]),
        }
    ),
)
def test_no_journal_stops_the_learner_and_restarts_change_nothing(
    seed: int, every: int, changes: dict[str, Any]
) -> None:
    journal = journals(seed)
    outcome, _ = folded(journal, **changes)
    expected = {version.version: version.sha256 for version in outcome.versions}
    made = restarted(journal, every, **changes)
    assert {number: version.sha256 for number, version in made.items()} == expected


@pytest.mark.parametrize("every", [1, 7])
def test_the_thresholds_of_new_arms_are_those_of_every_restarted_learner(every: int) -> None:
    """New arms come while two windows are open, one of them with sessions ahead of the watermark."""
    random, events = Random(0), []
    for at in range(0, 1_000, 100):
        for n in range(0, 100, 5):
            name, context = f"u{at + n}", (random.gauss(0, 1), random.gauss(0, 1))
            events += [opened(name, at + n, context=context)]
            events += [feedback(1 + n % 3, "abc"[n % 3], random.random() < 0.3, at + n + 5, name)]
        if at in (500, 700):
            events += [ArmChange(arm=f"new{at}", reward=2.0, active=True)]
        events += [progress(at + 95)]
    journal = written(events)
    versions = folded(journal)[0].versions
    grown = [after for before, after in pairwise(versions) if len(after.arms) > len(before.arms)]
    assert [0 < max(version.thresholds) < folding.NEVER for version in grown] == [True, True]
    made = restarted(journal, every)
    assert [made[version.version].sha256 for version in versions] == [version.sha256 for version in versions]


# ── records that raise ───────────────────────────────────────────────────────────────────────────────────────────────


def sessions(at: int) -> Iterator[JournalEvent]:
    for n in range(6):
        yield opened(f"u{at}{n}", at + n)
        yield feedback(2, "b", n % 2 == 0, at + n + 5, f"u{at}{n}")


def raising(call: Callable[..., Any], on: Callable[..., bool]) -> Callable[..., Any]:
    def wrapped(*arguments: Any, **named: Any) -> Any:
        if on(*arguments):
            raise ZeroDivisionError("as a test")
        return call(*arguments, **named)

    return wrapped


JOURNAL = written(
    [
        *sessions(0),
        ArmChange(arm="bad", reward=2.0, active=True),
        ArmChange(arm="good", reward=2.0, active=True),
        progress(200),
        *sessions(300),
        progress(500),
        *sessions(600),
        progress(1_000),
    ]
)


@pytest.mark.parametrize("every", [1, 7])
def test_a_record_that_raises_is_passed_over_in_every_learner(monkeypatch: pytest.MonkeyPatch, every: int) -> None:
    carry_out = raising(learner_module.carry_out, lambda _, order, *__: getattr(order, "arm", "") == "bad")
    monkeypatch.setattr(learner_module, "carry_out", carry_out)
    outcome, learner = folded(JOURNAL)
    assert [arm.arm for arm in learner.current.arms] == ["a", "b", "c", "good"]
    assert learner.current.version == 4
    assert list(outcome.troubles) == [("fold-passed-over", 1, "journal offset 12: ZeroDivisionError")]
    made = restarted(JOURNAL, every)
    assert made[4].sha256 == learner.current.sha256


@pytest.mark.parametrize("every", [1, 7])
def test_a_window_whose_estimate_raises_is_rejected_in_every_learner(
    monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    # Of the second window: the first fold has happened, no other has more observations.
    failing = raising(folding.with_thresholds, lambda folded, *_: folded.folds == 2)
    monkeypatch.setattr(folding, "with_thresholds", failing)
    outcome, learner = folded(JOURNAL)
    assert [episode.rejected for episode in outcome.episodes] == [None, *["ZeroDivisionError: as a test"] * 2]
    assert not outcome.troubles
    assert learner.current.version == 3
    assert restarted(JOURNAL, every)[3].sha256 == learner.current.sha256


def test_a_window_that_cannot_be_assessed_still_gives_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _ = folded(JOURNAL)
    monkeypatch.setattr(PersonalModel, "draws", raising(PersonalModel.draws, lambda *_: True))
    outcome, _ = folded(JOURNAL)
    assert [one.sha256 for one in outcome.versions] == [one.sha256 for one in expected.versions]
    assert {episode.regret_posterior for episode in outcome.episodes} == {None}


def test_a_window_that_cannot_be_joined_is_passed_over_and_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    joined = raising(windows_module.closed_window, lambda sessions, *_: ("u3000", 300) in sessions)
    monkeypatch.setattr(windows_module, "closed_window", joined)
    outcome, learner = folded(JOURNAL)
    assert list(outcome.troubles) == [("fold-passed-over", 1, "journal offset 27: ZeroDivisionError")]
    assert [episode.window_end for episode in outcome.episodes] == [100, 700]
    for every in (1, 7):
        assert restarted(JOURNAL, every)[learner.current.version].sha256 == learner.current.sha256


def test_an_error_that_another_machine_may_not_have_is_no_part_of_the_fold(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise MemoryError("as a test")

    monkeypatch.setattr(folding, "with_thresholds", fail)
    with pytest.raises(MemoryError, match="as a test"):
        folded(JOURNAL)


# ── orders that do not fit ───────────────────────────────────────────────────────────────────────────────────────────


def test_an_order_that_would_make_a_version_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    first = Parameters.first(SETTINGS, ARMS)
    now = version_sizes.largest_size(first.arms, first.model, first.settings)
    monkeypatch.setattr(version_sizes.too_large, "__defaults__", (now + 500,))
    many = tuple(ArmEntry(arm=f"n{n}", reward=1.0, active=True) for n in range(5))
    orders = [
        ArmChange(arm="x" * 200, reward=1.0, active=True),
        CatalogueChange(changes=many),
        ArmChange(arm="d", reward=1.0, active=True),
        ArmChange(arm="e", reward=1.0, active=True),
        ArmChange(arm="d", reward=1e12, active=False),  # adds nothing
    ]
    outcome, learner = folded(written(orders))
    assert [refusal.order for refusal in outcome.refusals] == [orders[0], orders[1], orders[3]]
    assert "more than the" in outcome.refusals[0].reason
    assert outcome.troubles.reports["order-refused"] == (3, outcome.refusals[-1].reason)
    assert [arm.arm for arm in learner.current.arms] == ["a", "b", "c", "d"]


def test_a_catalogue_that_does_not_fit_is_refused_at_the_start() -> None:
    arms = [Arm(arm=f"ad-{n}", reward=1.0) for n in range(50_000)]
    with pytest.raises(InputError, match=r"the catalogue is too large: 50,000 arms .* such arms fit"):
        Learner(LearningSettings(dim=32), arms)


@given(st.lists(st.text(min_size=1, max_size=9), max_size=20, unique=True), st.integers(1, 9), st.floats(1e-12, 1e12))
def test_no_record_of_a_version_is_larger_than_its_bound(names: list[str], dim: int, reward: float) -> None:
    encodable = [name for name in names if name.isprintable() or name.encode("utf-8", "ignore").decode() == name]
    arms = tuple(Arm(arm=name, reward=reward, active=False) for name in encodable)
    sums = Sums(sessions=MOST, ads=np.full((len(ROWS), len(arms)), reward))
    accounts = Accounts(since=MOST, day=MOST, total=sums, today=sums)
    settings = LearningSettings(dim=dim, standardise=False, control_share=0.1, control="popular")
    popular = tuple(range(len(arms)))
    parameters = replace(Parameters.first(settings, arms), accounts=accounts, popular=popular)
    misfit = np.full((len(arms), dim * (dim - 1) // 2), reward)
    calibration = Calibration(ads=np.full((5, len(arms)), reward))
    parameters = replace(parameters, calibration=calibration, misfit=Misfit(scores=misfit, informations=misfit))
    bound = version_sizes.largest_size(arms, parameters.model, parameters.settings)
    reserved = bound - version_sizes.RESERVE
    spare = 1_500 + 7 * parameters.model.most_inherited  # of arms that begin anew
    assert reserved - spare < len(encode_parameters(parameters)) <= reserved + 2_000


def test_a_fact_that_raises_costs_itself_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = raising(windows_module.pack_context, lambda context: context == (6.0, 6.0))
    monkeypatch.setattr(windows_module, "pack_context", failing)
    facts = [opened(f"s{n}", context=(float(n), float(n))) for n in range(9)]
    answers = [feedback(1, "a", n % 2 == 0, session_id=f"s{n}") for n in range(9)]
    values = [*map(encode_event, facts), b"{", *map(encode_event, answers), encode_event(progress(1_000))]
    outcome = Learner(SETTINGS, ARMS).handle(enumerate(values))
    assert [episode.sessions for episode in outcome.episodes] == [8]
    assert [(kind, times) for kind, times, _ in outcome.troubles] == [("fold-passed-over", 2)]
    (_, _, example), *_ = outcome.troubles
    assert example.startswith("journal offset 9: "), "in the order of the journal"
