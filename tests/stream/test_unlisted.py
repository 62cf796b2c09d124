"""Values that no category lists: counted, bounded, and named only where they come often."""

from __future__ import annotations

from collections import Counter
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.stream.scenes import TOPICS, serving
from worker.metrics.observer import Metrics
from worker.stream.features import Features
from worker.stream.parameters import Parameters
from worker.stream.settings import Arm, LearningSettings
from worker.stream.topology import LONGEST_VALUE, MOST_VALUES, OFTEN, Record, Unlisted
from worker.web.status import status_routes

DECLARED = Features.of_table(
    {"context": {"member": "boolean", "device": ["mobile", "desktop"], "country": {"hashed": 4}}}
)


def arrivals(*contexts: dict[str, Any]) -> list[Record]:
    values = [{"session_id": f"s{number}", "occurred_at": 5, "context": one} for number, one in enumerate(contexts)]
    return [Record(TOPICS.arrivals, 0, 0, 5, one["session_id"].encode(), orjson.dumps(one)) for one in values]


def handled(*contexts: dict[str, Any]) -> Any:
    settings = LearningSettings(dim=DECLARED.dim, features=DECLARED)
    return serving(Parameters.first(settings, (Arm(arm="cap", reward=1.0),))).handle(arrivals(*contexts))


@given(
    st.lists(st.lists(st.integers(0, 400).map(str) | st.sampled_from(["watch", "tv"]), max_size=150), max_size=8),
    st.integers(0, 300),
)
def test_frequent_values_stay_with_lower_bounds_for_any_order_of_batches(batches: list[list[str]], more: int) -> None:
    every, exact = Unlisted(), Counter[str]()
    for batch in [*batches, ["watch"] * more]:
        part = Unlisted()
        part.add([("device", value) for value in batch])
        every.update(part)
        exact.update(batch)
    kept = every.values.get("device", Counter())
    assert len(kept) <= MOST_VALUES
    assert every.features["device"] == exact.total()
    for value, count in exact.items():
        assert count - exact.total() / (MOST_VALUES + 1) <= kept[value] <= count


def test_values_that_a_category_does_not_list_are_counted_by_feature_and_missing_ones_are_not() -> None:
    emits = handled({"device": "watch"}, {"device": "mobile"}, {"country": "anything"}, {}, {"device": "tv"})
    assert emits.tally.unlisted.features == {"device": 2}
    assert emits.tally.opened == 5  # they are served


def test_the_trouble_names_the_feature_and_the_status_page_the_values_that_come_often() -> None:
    metrics = Metrics()
    long, rare = {"device": "watch" * 100}, {"device": "someone@example.org"}
    metrics.batches([handled(*[long] * OFTEN, *[rare] * (OFTEN - 1))], 2 * OFTEN - 1, 0.1)
    assert metrics.registry.get_sample_value("adcascade_unlisted_values_total") == 2 * OFTEN - 1
    (line,) = metrics.trouble_lines()
    assert line.startswith("unlisted-values: ")
    assert "the feature device" in line
    assert "watch" not in line
    document = status_routes(metrics)["/status.json"]({}).body
    values = [[("watch" * 100)[:LONGEST_VALUE], OFTEN]]
    assert orjson.loads(document)["unlisted"] == [{"feature": "device", "count": 39, "values": values}]
    assert b"someone" not in document


@pytest.mark.parametrize(("value", "number"), [(True, 1.0), (False, 0.0), (1, 1.0), (0.5, 0.5)])
def test_a_boolean_is_a_number_that_is_0_or_1(value: Any, number: float) -> None:
    assert DECLARED.context[0] == Features.of_table({"context": {"member": "number"}}).context[0]
    assert orjson.loads(handled({"member": value, "device": "mobile"}).journal[0][1])["context"][:3] == [number, 1, 0]
