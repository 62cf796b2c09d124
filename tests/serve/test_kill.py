"""kill -9 of `adcascade serve` under load: nothing that was answered is lost, and nothing is learned twice.

`ADCASCADE_KILLS=20` kills it more often.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from tests.counting import count_ads
from tests.serve.process import Clients, Seen, ServeProcess
from worker.cli.main import main
from worker.logs.format import LogReader

KILLS = int(os.environ.get("ADCASCADE_KILLS", "6"))
WINDOW, TIMEOUT, LATENESS = 1_000, 20_000, 500


@pytest.mark.slow
def test_kills_under_load_lose_no_answer_and_teach_nothing_twice(tmp_path: Path):
    times = ("--window", "1s", "--session-timeout", "20s", "--lateness", "500ms", "--warmup", "1")
    with ServeProcess(tmp_path, *times) as server:
        clients = Clients(server.url)
        asyncio.run(clients.run(8, _kill_again_and_again(server, clients)))
        _wait_for_windows(server)
        with urlopen(f"{server.url}/v1/arms", timeout=300) as response:
            figures = json.load(response)
        assert server.stop() == 0, server.output
    assert clients.again >= KILLS  # there was load, and it was disturbed
    records = _records(server.log)
    _check_facts(records["ads.journal"], clients.sessions)
    _check_lessons(records)
    _check_figures(records, figures)
    assert main(["replay", str(server.log), "--verify", "--json", str(tmp_path / "replay.json")]) == 0
    report = json.loads((tmp_path / "replay.json").read_text())
    assert not report["mismatches"], report


async def _kill_again_and_again(server: ServeProcess, clients: Clients) -> None:
    for number in range(KILLS):
        before = len(clients.sessions)
        async with clients.opened:
            await clients.opened.wait_for(lambda: len(clients.sessions) >= before + 30)  # noqa: B023 - awaited here
        killed = time.monotonic()
        await asyncio.to_thread(server.kill, everything=bool(number % 2))
        told = {name: (seen.position, seen.ended) for name, seen in _recent(clients, killed).items()}
        await asyncio.to_thread(server.start)
        await asyncio.to_thread(_check_memory, server, clients, told)


def _recent(clients: Clients, now: float) -> dict[str, Seen]:
    return {name: seen for name, seen in clients.sessions.items() if now - seen.answered_at < 2.0}


def _check_memory(server: ServeProcess, clients: Clients, told: dict[str, tuple[int, str | None]]) -> None:
    """Compare what clients were told before the kill with what the server knows after it."""
    for name, (position, ended) in told.items():
        with urlopen(f"{server.url}/v1/sessions/{name}", timeout=300) as response:
            knows = json.load(response)
        if ended is not None:
            assert knows["ended"] == ended, (name, knows)
        else:
            assert "ended" in knows or knows["position"] >= position, (name, position, knows)


def _wait_for_windows(server: ServeProcess) -> None:
    """Wait until the windows of all sessions are closed, as the log has them."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        records = _records(server.log, skip_bad=True)  # its last line may be half a line
        last = max(fact["arrived_at"] for _, fact in records["ads.journal"] if fact["kind"] == "opened")
        if last < max((episode["window_end"] for _, episode in records.get("ads.episodes", [])), default=0):
            return
        time.sleep(0.5)
    raise AssertionError("windows stay open")


def _records(path: Path, *, skip_bad: bool = False) -> dict[str, list[tuple[int, dict]]]:
    found: dict[str, list[tuple[int, dict]]] = {}
    with LogReader(path, skip_bad=skip_bad) as log:
        for line in log:
            document = json.loads(line.record.value or b"null")
            found.setdefault(line.record.topic, []).append((line.record.offset, document))
    return found


def _check_facts(journal: list[tuple[int, dict]], sessions: dict[str, Seen]) -> None:
    assert [offset for offset, _ in journal] == list(range(len(journal))), "the log has every record once, in order"
    opened = {fact["session_id"] for _, fact in journal if fact["kind"] == "opened"}
    assert set(sessions) <= opened
    reported = {
        (fact["session_id"], fact["position"], fact["arm"], fact["clicked"])
        for _, fact in journal
        if fact["kind"] == "feedback"
    }
    told = {(name, *report) for name, seen in sessions.items() for report in seen.reported}
    assert told <= reported


def _check_lessons(records: dict[str, list[tuple[int, dict]]]) -> None:
    """Count every session once, in its window, and every display once in the estimate."""
    windows = Counter(
        fact["arrived_at"] // WINDOW * WINDOW
        for fact in {
            fact["session_id"]: fact for _, fact in records["ads.journal"] if fact["kind"] == "opened"
        }.values()
    )
    episodes = [episode for _, episode in records["ads.episodes"]]
    assert len({episode["window_start"] for episode in episodes}) == len(episodes)
    assert {episode["window_start"]: episode["sessions"] for episode in episodes} == dict(windows)
    newest = max((version for _, version in records["ads.parameters"]), key=lambda version: version["version"])
    assert newest["observations"] == sum(episode["displays"] for episode in episodes)


def _check_figures(records: dict[str, list[tuple[int, dict]]], figures: dict[str, Any]) -> None:
    """Compare the figures per ad with a count from the raw records."""
    log = {topic: [value for _, value in found] for topic, found in records.items()}
    counted = count_ads(log, timeout=TIMEOUT, until=figures["until"])
    assert figures["sessions"] == len(counted.sessions) > 0
    for ad in figures["arms"]:
        found = [ad["total"][name] for name in ("displays", "clicks", "revenue")]
        assert found == pytest.approx(counted.ads[ad["arm"]][:3])
