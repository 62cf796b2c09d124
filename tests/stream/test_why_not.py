"""Every answer of `why_not` holds when the session is planned again with the difference that it names."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.stream.test_explanation import WAYS, chosen_in, parameters, versions
from worker.bandit.arrays import sigmoid
from worker.stream.catalogue import under
from worker.stream.contexts import pack_context
from worker.stream.events import Arrival
from worker.stream.slates import Slate, SlatePlanner
from worker.stream.why_not import why_not

SHADE = 1e-3  # the kernel computes in float32


def planned(version, arrival) -> Slate:
    return SlatePlanner(version).plan([arrival], [pack_context(arrival.context)])[0]


def place(version, arrival, arm) -> int:
    slate = planned(version, arrival).arms
    return slate.index(arm) + 1 if arm in slate else 0


def asked(version, arrival, arm):
    return why_not(version, arrival, arm, mode=[*planned(version, arrival).modes, "none"][0])


def with_arm(version, index, **changes):
    arms = list(version.arms)
    arms[index] = replace(arms[index], **changes)
    return replace(version, arms=tuple(arms))


def with_odds(version, index, shift):
    """Return a version that expects other log-odds of one arm of every user, and is as certain of them."""
    other = version.model.shifted(index, shift)
    contexts = np.eye(version.model.dim)
    moved = other.log_odds(contexts) - version.model.log_odds(contexts)
    assert moved == pytest.approx(
        np.broadcast_to(shift * (np.arange(len(version.arms)) == index), moved.shape), abs=1e-9
    )
    assert np.array_equal(other.widths(contexts), version.model.widths(contexts))
    return replace(version, model=other)


@given(version=versions, ways=WAYS, seed=st.integers(0, 1000), arm=st.integers(0, 8), out=st.booleans())
def test_with_the_least_revenue_or_probability_the_ad_is_shown_and_with_a_shade_less_it_is_not(
    version, ways, seed, arm, out
):
    version = chosen_in(ways, version)
    index = arm % len(version.arms)
    name = version.arms[index].arm
    context = np.random.default_rng(seed).standard_normal(version.model.dim)
    arrival = Arrival(
        session_id=f"s{seed}", occurred_at=0, context=tuple(context.tolist()), exclude=(name,) if out else ()
    )
    said = asked(version, arrival, name)
    assert said.position == place(version, arrival, name)
    assert (said.obstacle is None) == (version.arms[index].active and not out)
    free = with_arm(version, index, active=True)
    arrival = Arrival(session_id=arrival.session_id, occurred_at=0, context=arrival.context)
    assert said.without_obstacle == place(free, arrival, name)
    if said.if_explored is not None:
        assert said.if_explored == place(under(replace(version.settings, policy="ucbbp"), free), arrival, name)
    cases = []
    if said.revenue is not None:
        cases.append((said.revenue, lambda value, by: with_arm(free, index, reward=value * (1 + by))))
    if said.probability is not None:
        now = log_odds(said.probability.now)
        cases.append((said.probability, lambda value, by: with_odds(free, index, log_odds(value) - now + by)))
    for needed, changed in cases:
        for least, is_shown in ((needed.first, lambda there: there == 1), (needed.anywhere, lambda there: there > 0)):
            if least is None or least == needed.now:
                assert is_shown(said.without_obstacle) == (least is not None)
            elif needed is said.revenue or least < 1 - 1e-6:  # of one nearer to 1 the log-odds have no digits
                assert is_shown(place(changed(least, SHADE), arrival, name))
                assert not is_shown(place(changed(least, -SHADE), arrival, name))


def log_odds(chance) -> float:
    return float(np.log(chance) - np.log1p(-chance))


def test_without_an_id_the_policy_alone_answers_and_a_lot_has_no_answer_but_its_chance():
    version = parameters(arms=3, policy="greedy", horizon=1)
    nobody = Arrival(session_id="", occurred_at=0, context=(0.0,) * 3)
    best = planned(version, nobody).arms[0]
    other = next(arm.arm for arm in version.arms if arm.arm != best)
    said = why_not(version, nobody, other, mode="exploit")
    index = version.indices[other]
    assert said.revenue.first == said.revenue.anywhere > said.revenue.now == version.arms[index].reward
    chances = sigmoid(version.model.log_odds(np.zeros((1, 3))))[0]
    worth = chances[version.indices[best]] * version.rewards[version.indices[best]]
    assert said.revenue.first == pytest.approx(worth / chances[index], rel=1e-5)
    assert said.probability.first == pytest.approx(worth / version.rewards[index], rel=1e-5)
    somebody = Arrival(session_id="s", occurred_at=0, context=(0.0,) * 3)
    drawn = asked(under(replace(version.settings, warmup=9), version), somebody, other)
    assert (drawn.drawn, drawn.revenue, drawn.probability) == (1 / 3, None, None)
    fallback = why_not(version, nobody, other, mode="fallback")
    assert fallback.revenue.first == pytest.approx(max(version.rewards), rel=1e-5)
    assert fallback.probability is None
