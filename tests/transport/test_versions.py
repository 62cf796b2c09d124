"""Published versions: the thread that reads them, those that contradict each other, and the settings of a worker."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from confluent_kafka import KafkaError
from faust.types import TP

from tests.embedded.traffic import ARMS, START, settings
from tests.programs import until
from tests.transport.memory import NOWHERE, Cluster, FakeAdmin, FakeConsumer, event
from worker.errors import FailedError, InputError
from worker.kafka.parameters import PublishedParameters, UnfitError, VersionReader
from worker.metrics.observer import Metrics
from worker.runtime.settings import ProcessSettings, different
from worker.runtime.supervision import Pauses
from worker.stream.features import Features
from worker.stream.parameters import Parameters
from worker.stream.settings import Arm
from worker.stream.topology import Record, Topics
from worker.stream.version_records import encode_parameters
from worker.stream.versions import KEPT, RoundedError

ZERO = Parameters.first(settings(), ARMS)
TOPICS = Topics("t")
PLACE = TP(TOPICS.parameters, 0)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """Kafka in memory, in place of librdkafka."""
    made = Cluster.with_topics(TOPICS)
    monkeypatch.setattr("worker.kafka.clients.Consumer", lambda _: FakeConsumer(made))
    monkeypatch.setattr("worker.kafka.parameters.AdminClient", lambda _: FakeAdmin(made))
    monkeypatch.setattr(VersionReader, "pauses", Pauses(first=0.001, most=0.001))
    return made


def publish(cluster: Cluster, parameters: Parameters) -> None:
    cluster.append(*PLACE, b"0", encode_parameters(parameters))


@asynccontextmanager
async def reading() -> AsyncIterator[tuple[VersionReader, PublishedParameters, Metrics]]:
    metrics = Metrics()
    published = PublishedParameters(ZERO, [], metrics)
    reader = VersionReader(
        *(NOWHERE, TOPICS, published.take),
        prepare=published.prepare,
        report=partial(metrics.troubles.set, "versions-down"),
    )
    running = asyncio.create_task(reader.run())
    try:
        yield reader, published, metrics
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError, UnfitError):
            await running


def version(number: int, **changes: Any) -> Parameters:
    return replace(ZERO, version=number, journal_offset=number, **changes)


async def test_versions_come_with_prepared_planners(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[int]()
    monkeypatch.setattr("worker.kafka.parameters.prepared", lambda one: made.append(one.version) or None)
    publish(cluster, ZERO)
    async with reading() as (reader, published, _):
        await reader.catch_up()
        publish(cluster, version(1))
        await until(lambda: published.version == 1)
        publish(cluster, version(1, made_at=5))  # published again
        await reader.catch_up()
    assert made == [0, 1]


async def test_catching_up_returns_when_all_is_taken_that_was_there(cluster: Cluster) -> None:
    async with reading() as (reader, published, _):
        caught_up = asyncio.create_task(reader.catch_up())
        await asyncio.sleep(0)
        assert not reader.ready, "there is no version yet"
        for number in range(3):
            publish(cluster, version(number))
        await caught_up
        assert published.version == 2
        publish(cluster, version(3))
        await reader.catch_up()
        assert published.version == 3


async def test_a_topic_that_cannot_be_read_is_trouble_and_read_again(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    publish(cluster, ZERO)
    cluster.incoming = [event(PLACE, 0, KafkaError._TRANSPORT)]
    async with reading() as (reader, published, metrics):
        await reader.catch_up()
        assert published.version == 0
        await until(lambda: "trouble is over: versions-down" in caplog.messages and not metrics.troubles.active())


async def test_a_record_that_is_no_version_is_refused_and_the_next_is_taken(cluster: Cluster) -> None:
    publish(cluster, ZERO)
    cluster.append(*PLACE, b"0", b"{")
    cluster.append(*PLACE, b"0", None)
    publish(cluster, version(1))
    async with reading() as (reader, published, metrics):
        await reader.catch_up()
        assert published.version == 1
        assert metrics.registry.get_sample_value("adcascade_refused_versions_total") == 1


async def test_a_version_that_this_worker_cannot_serve_by_ends_it(cluster: Cluster) -> None:
    publish(cluster, Parameters.first(settings(dim=settings().dim + 1), ARMS))
    async with reading() as (reader, _, _metrics):
        with pytest.raises(
            UnfitError, match=r"another worker has published version 0: --dim is \d, but the published .* have \d"
        ):
            await reader.run()


# ── versions that contradict each other ──────────────────────────────────────────────────────────────────────────────


def other(parameters: Parameters) -> Parameters:
    return replace(parameters, arms=(*parameters.arms[:-1], Arm(arm="other", reward=1.0)))


def on_topic(*versions: Parameters) -> list[Record]:
    return [Record("t.parameters", 0, offset, 0, b"0", encode_parameters(one)) for offset, one in enumerate(versions)]


def counted(metrics: Metrics, name: str, **labels: str) -> float:
    return metrics.registry.get_sample_value(f"adcascade_{name}", labels) or 0.0


def test_the_first_published_version_replaces_the_configured_one() -> None:
    metrics = Metrics()
    published = PublishedParameters(other(ZERO), [], metrics)
    assert (published.version, published.history) == (-1, ())
    published.handle(on_topic(ZERO))
    assert published.version == 0
    assert published.versions.history == (ZERO,)
    published.handle(on_topic(ZERO, version(1)))
    assert (published.version, published.versions.newest.version) == (1, 1)
    assert counted(metrics, "refused_versions_total") == 0
    with pytest.raises(FailedError, match="two learners disagree"):
        published.wants(other(ZERO))  # it must not publish its own over it
    started = PublishedParameters(other(ZERO), [ZERO, version(1)], Metrics())
    assert [one.version for one in started.versions.history] == [0, 1], "and those of a start"


def test_what_the_topic_has_of_the_past_is_not_logged_after_a_start(caplog) -> None:
    caplog.set_level("INFO")
    old = [version(number) for number in range(20)]
    published = PublishedParameters(ZERO, old[12:], Metrics())
    caplog.clear()
    published.handle(on_topic(*old))
    assert "received" not in caplog.text
    published.handle(on_topic(version(20)))
    assert "version 20" in caplog.text
    assert published.newest == version(20)


def test_a_version_that_differs_by_rounding_is_the_same_version(caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics()
    published = PublishedParameters(ZERO, [ZERO, version(1)], metrics)
    rounded = replace(version(1), model=version(1).model.shifted(0, 1e-12))
    assert rounded.sha256 != version(1).sha256
    published.handle(on_topic(rounded, version(2)))
    assert counted(metrics, "rounded_versions_total") == 1
    assert counted(metrics, "refused_versions_total") == 0
    assert [one.sha256 for one in published.versions.history] == [one.sha256 for one in (ZERO, version(1), version(2))]
    with pytest.raises(RoundedError):
        published.wants(rounded)
    assert counted(metrics, "refused_versions_total") == 0


def test_the_last_eight_versions_are_kept_from_their_newest_position() -> None:
    published = PublishedParameters(ZERO, [], Metrics())
    published.handle(on_topic(*(version(number) for number in range(12))))
    again = version(11, frozen=False)
    published.handle(on_topic(replace(again, journal_offset=99), replace(again, journal_offset=50)))
    assert [one.version for one in published.history] == list(range(12 - KEPT, 12))
    assert published.history[-1].journal_offset == 99
    assert published.versions.newest.version == 11


def test_a_version_is_wanted_if_it_is_new_or_the_newest_from_a_newer_position() -> None:
    metrics = Metrics()
    published = PublishedParameters(ZERO, [version(3)], metrics)
    assert published.wants(version(4))
    assert not published.wants(version(3))
    assert published.wants(replace(version(3), journal_offset=70))
    assert not published.wants(version(2))
    with pytest.raises(FailedError, match="two learners disagree"):
        published.wants(other(version(3)))
    assert counted(metrics, "refused_versions_total") == 1


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model": "additive"}, "version 1 has model additive, version 0 has personal"),
        ({"dim": 7}, "version 1 has dim 7, version 0 has 3"),
        ({"standardise": True}, "version 1 has standardise True, version 0 has False"),
    ],
    ids=str,
)
def test_a_version_of_another_model_is_refused_with_one_line_and_serving_goes_on(
    change: dict[str, Any], text: str, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = Metrics()
    published = PublishedParameters(ZERO, [ZERO], metrics)
    other = replace(Parameters.first(settings(**change), ARMS), version=1)
    published.handle([Record(TOPICS.parameters, 0, 5, START, b"1", encode_parameters(other))])
    assert published.versions.newest == ZERO
    assert published.version == 0
    refusals = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert [text in refusal for refusal in refusals] == [True]
    assert counted(metrics, "refused_versions_total") == 1


def configuration(**changes: Any) -> ProcessSettings:
    return ProcessSettings(**{"learner": ("true",), "learning": settings(), "arms": ARMS, **changes})


def test_the_dimension_comes_from_the_option_or_from_the_published_parameters() -> None:
    learning, first = configuration(dim=5).configured([])
    assert learning.dim == first.settings.dim == 5
    learning, first = configuration().configured([ZERO])
    assert (learning.dim, first) == (ZERO.settings.dim, ZERO)
    with pytest.raises(InputError, match=r"add \[features.context\] .* or give --dim N"):
        configuration().configured([])
    with pytest.raises(InputError, match="--dim is 9, but the published parameters have 3"):
        configuration(dim=9).configured([ZERO])


def test_what_differs_from_the_published_settings_is_named() -> None:
    (line,) = configuration().surprises(replace(ZERO, settings=settings(window=20_000, policy="greedy")))
    assert line.endswith("policy, window")
    assert configuration().surprises(ZERO) == []
    own = settings()
    completed = replace(own, features=Features.of_table({"ads": {"price": "number"}}), standardise=False)
    assert different(own, completed) == [], "the first catalogue has completed the features"
    (line,) = configuration(learning=settings(standardise=True)).surprises(ZERO)
    assert line.startswith("standardise is on here and off in the published parameters")
    (line,) = configuration(arms=()).surprises(Parameters.first(settings(), ()))
    assert line.startswith("there are no arms")


def test_a_catalogue_file_that_differs_is_a_surprise_with_the_difference() -> None:
    hat, shoe, old = (Arm(arm="hat", reward=1.0), Arm(arm="shoe", reward=2.0), Arm(arm="old", reward=3.0, active=False))
    newest = replace(Parameters.first(settings(), (hat, shoe, old)), version=7)
    (line,) = configuration(arms=(replace(shoe, reward=2.5), Arm(arm="coat", reward=4.0))).surprises(newest)
    assert "of version 7, which hold: 1 added, 1 retired and 1 changed: " in line
    assert all(change in line for change in ("+ coat 4", "− hat 1", "~ shoe 2 → 2.5", "arms sync FILE"))
    (line,) = configuration(arms=tuple(Arm(arm=f"ad-{index}", reward=1.0) for index in range(100))).surprises(newest)
    assert "100 added, 2 retired" in line
    assert "and 97 more" in line
    assert configuration(arms=(hat, shoe)).surprises(newest) == []


def test_a_catalogue_file_that_does_not_fit_the_declared_features_matters_to_version_0_alone() -> None:
    wanted = configuration(arms=(), unfit=InputError("--catalog ads.csv: row 2 has no season"))
    with pytest.raises(InputError, match="row 2 has no season"):
        wanted.configured([])
    assert wanted.configured([ZERO])[1] == ZERO
    (line,) = wanted.surprises(ZERO)
    assert line == "the ads are those of version 0: --catalog ads.csv: row 2 has no season"
