"""Everything at once: whatever machines, operators and clients do, nothing stops it and nothing misleads it in silence.

The acts are in `hostilities.py`, and `plan.py` has the variables. The traffic has a driver of its own (`driver.py`).
It is judged by an oracle that reads the raw topics (`oracle.py`, `judge.py`).
"""

from __future__ import annotations

import itertools
import pickle
import random
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from tests.kafka.conftest import OwnBroker
from tests.kafka.hostile.driver import Driver
from tests.kafka.hostile.fleet import HostileFleet
from tests.kafka.hostile.hostilities import Hostilities
from tests.kafka.hostile.judge import Judge, replayed
from tests.kafka.hostile.ledger import Ledger, Timeline, now_ms
from tests.kafka.hostile.oracle import read_topics
from tests.kafka.hostile.plan import Plan, plan_of
from tests.kafka.hostile.watch import Watch
from tests.programs import eventually

pytestmark = pytest.mark.slow

#: Seconds within which everything is served and learned after the last act.
RECOVERY = 300.0


def attack(plan: Plan, hostilities: Hostilities) -> None:
    """Carry out a plan."""
    end = time.monotonic() + plan.seconds
    for before, act in itertools.pairwise([None, *plan.acts]):
        due = time.monotonic() + act.at - (before.at if before else 0.0)
        while time.monotonic() < min(due, end):
            hostilities.tend()
            time.sleep(0.1)
        if time.monotonic() < end:
            hostilities.commit(act)
    hostilities.end()


def recover(fleet: HostileFleet, driver: Driver) -> list[str]:
    """Wait until everything sent is answered and learned; return what is missing after `RECOVERY` seconds."""
    driver.stop_arrivals()
    deadline = time.monotonic() + RECOVERY
    while time.monotonic() < deadline:
        fleet.keep()
        if driver.settled() and not driver.waiting and driver.closed_until > driver.last_arrival:
            return []
        time.sleep(0.1)
    missing = f"{len(driver.waiting)} arrivals without an answer, such as {list(driver.waiting)[:3]}"
    return [f"no recovery within {RECOVERY:g} s: {missing}; windows closed to {driver.closed_until - now_ms()} ms"]


def stop(fleet: HostileFleet) -> list[str]:
    """Stop all workers as an orchestrator does; return what went wrong."""
    wrong = []
    for worker in [one for one in fleet.workers if one.running]:
        try:
            code = worker.terminate()
        except subprocess.TimeoutExpired:
            wrong.append(f"{fleet.name(worker)} does not end after SIGTERM")
            continue
        # One that has only just been started has no handler yet.
        if code and (worker in fleet.ready_once or code != -signal.SIGTERM):
            wrong.append(f"{fleet.name(worker)} ended with {code} after SIGTERM")
    return wrong


def fail(findings: list[str], timeline: Timeline, fleet: HostileFleet) -> None:
    """Fail with everything that helps to find the cause. The evidence can be judged again without a broker."""
    where = f"The logs of the workers and the evidence are in {fleet.folder}."
    text = "\n".join(findings)
    pytest.fail(f"{len(findings)} findings:\n{text}\n\n{where}\n\nTimeline:\n{timeline}", pytrace=False)


def test_nothing_stops_it_and_nothing_misleads_it_in_silence(tmp_path: Path, own_broker: OwnBroker) -> None:
    plan, timeline, ledger = plan_of(), Timeline(), Ledger()
    timeline.note(f"ADCASCADE_HOSTILE_SEED={plan.seed}, {plan.seconds:g} s of hostility")
    sys.stdout.write(f"\n{timeline}\n{plan}\n")
    with ExitStack() as stack:
        fleet = stack.enter_context(closing(HostileFleet(own_broker, tmp_path, timeline)))
        # The first two may already differ, on empty topics.
        fleet.kept.append(fleet.start(*random.Random(plan.seed).choice([[], *fleet.other_settings])))
        fleet.keep()
        eventually(lambda: all(worker.ready for worker in fleet.kept), what="the workers are ready")
        driver = Driver(fleet.address, "hostile", ledger, timeline, plan.seed)
        driver.start()
        stack.callback(driver.close)
        watch, hostilities = Watch(fleet, driver), Hostilities(fleet, driver)
        watch.start()
        timeline.note("the hostilities begin")
        try:
            attack(plan, hostilities)
            timeline.note("the hostilities end")
            findings = recover(fleet, driver)
            timeline.note("recovered" if not findings else findings[0])
        finally:
            watch.close()
        findings += [*watch.silent[:3], *watch.imbalances[:3], *stop(fleet), *fleet.deaths]
        topics = read_topics(fleet.address, "hostile")
        (tmp_path / "evidence.pickle").write_bytes(pickle.dumps((topics, ledger)))
        judge = Judge(topics, ledger)
        findings += judge.findings()
        findings += replayed(tmp_path, fleet.flags, judge.last_version)
        timeline.note(f"{ledger.summary()}\n{judge.summary()}")
        timeline.note(f"longest stalls {watch.longest}, troubles {watch.troubles}, memory {watch.most_memory} MiB")
        sys.stdout.write(f"{timeline}\n")
        if findings:
            fail(findings, timeline, fleet)
