"""`adcascade worker` on the real broker: the results of the embedded runner, readiness, shutdown, secrets."""

from __future__ import annotations

import signal

import orjson
import pytest

from tests.embedded.traffic import SECOND, START, arrivals, settings
from tests.kafka.fleet import Fleet
from tests.kafka.golden import Golden, last_decisions, play
from tests.kafka.world import eventually

pytestmark = pytest.mark.slow


def test_the_golden_scenario_on_two_workers_is_the_embedded_run(fleet: Fleet) -> None:
    golden = Golden()
    fleet.set_clock(START)
    one, two = fleet.serving(), fleet.serving()
    eventually(lambda: one.ready and two.ready)
    play(golden, fleet)
    assert golden.runner.versions.newest.version >= 4
    assert [version.sha256 for version in fleet.control.history()] == golden.hashes
    assert fleet.facts() == golden.facts
    ours = last_decisions([record.value for record in fleet.read(fleet.names.decisions)])
    theirs = last_decisions(golden.values("decisions"))
    # Feedback of several positions in one batch is answered once, and the batches differ.
    common = ours.keys() & theirs.keys()
    assert {key: ours[key] for key in common} == {key: theirs[key] for key in common}
    assert len({session for session, _ in common}) == 200
    assert {orjson.loads(value)["parameters_version"] for value in ours.values()} > {0}
    for worker in (one, two):
        assert worker.balanced
        assert worker.metric("adcascade_refused_versions_total") == 0
    assert sum(worker.metric("adcascade_arrivals_total") for worker in (one, two)) == 200
    assert sum(worker.metric("adcascade_learning") for worker in (one, two)) == 1


def test_workers_that_begin_with_different_configurations_agree_on_one_version_0(fleet: Fleet) -> None:
    fleet.set_clock(START + 10 * SECOND)
    other = fleet.folder / "other.json"
    other.write_bytes(orjson.dumps({"else": 1.0}))
    workers = [fleet.start(), fleet.start("--catalog", str(other), "--horizon", "1"), fleet.start("--dim", "7")]
    eventually(lambda: fleet.read(fleet.names.parameters), what="version 0 is published")
    published = orjson.loads(fleet.read(fleet.names.parameters)[0].value)
    fits = [worker for worker in workers if (worker is workers[2]) == (published["dim"] == 7)]
    for worker in workers:
        if worker not in fits:
            assert eventually(lambda worker=worker: not worker.running or None, what="it ends") is True
            assert worker.process.returncode in (1, 2)
            assert "--dim is" in worker.tail()
            assert "Traceback" not in worker.tail()
    for worker in fits:
        eventually(lambda worker=worker: worker.ready, what="it serves")
    arms = {arm["arm"] for arm in published["arms"]}
    if published["dim"] != 7:
        odd = workers[1] if arms != {"else"} else workers[0]
        eventually(lambda: "catalogue-differs" in odd.ask("/readyz")[1], what="another catalogue is reported")
    sent = arrivals(300, seconds=10)
    if published["dim"] != 7:
        fleet.send(sent)
        eventually(lambda: len(fleet.answered()) == 300, what="every arrival is answered")
    decisions = [orjson.loads(record.value) for record in fleet.read(fleet.names.decisions)]
    assert {decision["arm"] for decision in decisions} <= arms
    zeros = [orjson.loads(record.value) for record in fleet.read(fleet.names.parameters)]
    assert {zero["sha256"] for zero in zeros if zero["version"] == 0} == {published["sha256"]}


def test_a_terminated_worker_ends_in_good_order_and_another_continues_without_a_loss(fleet: Fleet) -> None:
    fleet.set_clock(START + 10 * SECOND)
    first = fleet.serving()
    sent = arrivals(6_000, seconds=10)
    fleet.send(sent[:3_000])
    eventually(lambda: first.metric("adcascade_arrivals_total") > 0, what="it has begun")
    assert first.terminate() == 0, first.tail()
    fleet.send(sent[3_000:])
    second = fleet.serving()
    eventually(lambda: len(fleet.facts()) == 6_000, what="every arrival is in the journal")
    recovered = second.metric("adcascade_sessions_recovered_total")
    opened = second.metric('adcascade_arrivals_classified_total{class="opened"}')
    assert recovered + opened == 6_000
    assert recovered > 0, "what the first had opened came with the changelog"
    eventually(lambda: second.metric("adcascade_open_sessions") == 6_000)
    assert second.balanced


def test_a_worker_is_alive_at_once_and_ready_when_it_serves(fleet: Fleet) -> None:
    worker = fleet.start()
    seen = set()

    def serves() -> bool:
        status, text = worker.ask("/readyz")
        seen.add((status, text.strip()))
        if status:
            assert worker.ask("/livez") == (200, "alive\n")
        return status == 200

    eventually(serves)
    refused = {text for status, text in seen if status == 503}
    assert refused, "it was not ready while it joined its group"
    assert all(text.startswith("not ready: ") for text in refused)
    assert fleet.control.history()[0].version == 0, "ready: version 0 is published"
    assert "<title>" in worker.ask("/")[1]
    assert worker.ask("/status.json")[0] == 200
    assert worker.ask("/table")[0] == 404
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        written = len(worker.log.read_text(encoding="utf-8"))
        worker.process.send_signal(number)
        eventually(lambda before=written: len(worker.log.read_text(encoding="utf-8")) > before, what="it writes stacks")
        assert worker.ready, "no signal but those that end it disturbs it"


def test_secrets_sign_tokens_and_are_in_no_log(fleet: Fleet) -> None:
    secret = "a secret of at least sixteen bytes"
    worker = fleet.serving("--log-level", "debug", ADCASCADE_TOKEN_SECRET=secret)
    (one,) = arrivals(1, seconds=1)
    fleet.send([one])
    decisions = eventually(lambda: fleet.read(fleet.names.decisions), what="a decision")
    assert len(orjson.loads(decisions[0].value)["tokens"]) == settings().horizon
    worker.terminate()
    assert secret not in worker.log.read_text(encoding="utf-8")
    assert secret not in str(worker.lines)
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in worker.lines)
    assert len(worker.lines) == len(worker.log.read_text(encoding="utf-8").splitlines()), "JSON and nothing else"
