"""`adcascade worker` on the real broker: the results of the embedded runner, readiness, shutdown."""

from __future__ import annotations

import signal

import orjson
import pytest

from tests.embedded.traffic import SECOND, START, arrivals
from tests.kafka.fleet import Fleet
from tests.kafka.golden import Golden, last_decisions, play
from tests.programs import eventually
from worker.logs.format import LogWriter

pytestmark = pytest.mark.slow


def test_the_golden_scenario_on_workers_that_join_and_leave_is_the_embedded_run(fleet: Fleet) -> None:
    golden = Golden()
    fleet.set_clock(START)
    fleet.serving()

    def disturb(step: int) -> None:
        if step in (2, 4):
            fleet.start()
        if step in (7, 9):
            leaving = fleet.running[0]
            assert leaving.terminate() == 0, leaving.tail()

    play(golden, fleet, disturb)
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
    (last,) = fleet.running
    assert last.balanced
    assert last.metric("adcascade_refused_versions_total") == 0
    # The learner ended with the worker before, and what that had learned may be enough for all of the above.
    eventually(lambda: last.metric("adcascade_learning") == 1, what="the learner runs on the last worker")


def test_workers_that_begin_with_different_configurations_agree_on_one_version_0(fleet: Fleet) -> None:
    fleet.set_clock(START + 10 * SECOND)
    (other := fleet.folder / "other.json").write_bytes(orjson.dumps({"else": 1.0}))
    workers = fleet.start(), fleet.start("--catalog", str(other), "--horizon", "1")
    eventually(lambda: all(worker.ready for worker in workers), what="both serve")
    zeros = [orjson.loads(record.value) for record in fleet.read(fleet.names.parameters)]
    assert len({zero["sha256"] for zero in zeros}) == 1
    arms = {arm["arm"] for arm in zeros[0]["arms"]}
    unfit = fleet.start("--dim", "7")
    assert unfit.process.wait(300) == 2
    assert "--dim is" in unfit.tail()
    assert "Traceback" not in unfit.tail()
    fleet.send(arrivals(300, seconds=10))
    eventually(lambda: len(fleet.answered()) == 300, what="every arrival is answered")
    decisions = [orjson.loads(record.value) for record in fleet.read(fleet.names.decisions)]
    assert {decision["arm"] for decision in decisions} <= arms


def test_workers_that_start_from_a_history_agree_on_one_version_0_and_restart_from_what_is_there(fleet: Fleet) -> None:
    fleet.set_clock(START + 10 * SECOND)
    with LogWriter(log := str(fleet.folder / "history.gz")) as write:
        for record in Golden().records:
            write(record)
    workers = [fleet.start("--start-from", log, "--trust", "0.5") for _ in range(2)]
    eventually(lambda: all(worker.ready for worker in workers), what="both serve")
    zeros = [orjson.loads(record.value) for record in fleet.read(fleet.names.parameters)]
    assert len({zero["sha256"] for zero in zeros}) == 1
    assert zeros[0]["started_from"]["trust"] == 0.5
    again = fleet.serving("--start-from", log)
    assert "ignored" not in again.tail()
    other = fleet.serving("--start-from", str(fleet.folder / "arms.json"))
    assert "started from another one, or with another trust, 0.5" in other.tail()


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
        written = len(worker.text)
        worker.process.send_signal(number)
        eventually(lambda before=written: len(worker.text) > before, what="it writes stacks")
        assert worker.ready, "no signal but those that end it disturbs it"
