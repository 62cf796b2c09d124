"""`adcascade record` on the real broker: the log holds the topics, and replay reads it."""

from __future__ import annotations

import gzip
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter, defaultdict
from contextlib import closing
from pathlib import Path

import orjson
import pytest

from tests.kafka.fleet import ROOT, Fleet
from tests.programs import eventually
from worker.cli.main import main
from worker.logs.format import Line, LogReader
from worker.stream.events import TOPICS

pytestmark = pytest.mark.slow

SESSIONS = 4_000


def lines(path: Path) -> list[Line]:
    with LogReader(path) as log:
        return list(log)


def positions(path: Path) -> list[tuple[str, int, int]]:
    return [(line.record.topic, line.record.partition, line.record.offset) for line in lines(path)]


# ── with workers ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_workers_did_with_untidy_traffic_is_recorded_and_replays_without_a_mismatch(
    fleet: Fleet, tmp_path: Path
) -> None:
    arms, said, log, report = (tmp_path / name for name in ("a.json", "said.json", "log.gz", "report.json"))
    assert main(["traffic", "--write-arms", str(arms)]) == 0
    # Short windows: all of it may take less than a second.
    times = ["--window", "100ms", "--session-timeout", "6s", "--lateness", "2s"]
    worker = fleet.serving("--catalog", str(arms), "--dim", "5", "--horizon", "5", *times)
    untidy = ["--poison", "0.02", "--duplicates", "0.05", "--disorder", "500ms", "--patience", "5s"]
    pace = ["--rate", "1000", "--look", "0-50ms", "--sessions", str(SESSIONS), "--json", str(said)]
    assert main(["traffic", *fleet.flags, *untidy, *pace]) == 0
    sent = orjson.loads(said.read_bytes())["records"]
    assert sent["total"] > 4 * SESSIONS
    eventually(lambda: worker.metric("adcascade_parameters_version") >= 3, what="windows are closed")
    # The workers continue: progress and versions are written while this is read.
    assert main(["record", str(log), *fleet.flags]) == 0
    session = next(
        line.record.key for line in reversed(lines(log)) if line.record.topic.endswith(".decisions")
    ).decode()
    for source in ([str(log), "--prefix", fleet.names.prefix], fleet.flags):
        assert main(["explain", *source, "--session", session, "--json", str(report)]) == 0
        assert orjson.loads(report.read_bytes())["session"]["id"] == session
    fleet.close()  # replay needs no worker
    assert main(["replay", str(log), "--verify", "--prefix", fleet.names.prefix, "--json", str(report)]) == 0
    found = orjson.loads(report.read_bytes())
    assert found["mismatches"] == 0
    assert found["unverified"] == 0
    assert found["decisions"] > 2 * SESSIONS
    recorded = lines(log)
    counts = Counter(line.record.topic.removeprefix(f"{fleet.names.prefix}.") for line in recorded)
    assert counts["arrivals"] == sent["arrivals"]
    assert counts["clicks"] == sent["clicks"]
    assert [version["status"] for version in found["versions"]] == ["folded"] * len(found["versions"])
    assert len(found["versions"]) >= 4
    letters = [line for line in recorded if line.record.topic == fleet.names.dead_letters]
    assert len(letters) > 0.01 * SESSIONS
    assert all(dict(letter.headers)["adcascade.reason"] for letter in letters)
    totals = []
    for source in (fleet.flags, [str(log), "--prefix", fleet.names.prefix]):
        assert main(["report", *source, "--period", "all", "--json", str(report)]) == 0
        totals.append(orjson.loads(report.read_bytes())["total"])
    assert totals[0] == pytest.approx(totals[1])
    assert totals[0]["sessions"] > 0.9 * SESSIONS


# ── without ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def fill(fleet: Fleet, rounds: int = 3, each: int = 40) -> None:
    """Write some records to every topic, some of them not text."""
    names = fleet.names
    topics = [names.arrivals, names.clicks, names.decisions, names.journal, names.episodes, names.dead_letters]
    for number in range(rounds):
        fleet.send_raw(
            [
                (topic, b"key-%d" % n, b"\xff%d" % n if n % 9 == 0 else b'{"n":%d}' % n)
                for topic in topics
                for n in range(each)
            ]
        )
        for topic in (names.parameters, names.parameters_history):
            fleet.send_raw([(topic, b"%d" % number, b'{"version":%d}' % number)])


def there(fleet: Fleet) -> list[tuple[str, int, int]]:
    found = []
    for name in TOPICS:
        found += [(r.topic, r.partition, r.offset) for r in fleet.read(f"{fleet.names.prefix}.{name}")]
    return found


@pytest.fixture(scope="module")
def filled(address: str, tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    """Topics with records, for tests that only read."""
    fleet = Fleet(address, f"r{uuid.uuid4().hex[:8]}", tmp_path_factory.mktemp("filled"))
    fill(fleet)
    return fleet


def test_every_record_of_every_topic_is_in_the_log_once_in_the_order_of_its_partition_and_to_the_byte(
    filled: Fleet, tmp_path: Path
) -> None:
    path = tmp_path / "log.gz"
    assert main(["record", str(path), *filled.flags]) == 0
    assert sorted(positions(path)) == sorted(there(filled))
    offsets = defaultdict(list)
    for topic, partition, offset in positions(path):
        offsets[topic, partition].append(offset)
    assert all(found == sorted(found) for found in offsets.values())
    kept = {(line.record.topic, line.record.partition, line.record.offset): line.record for line in lines(path)}
    for topic in (filled.names.arrivals, filled.names.dead_letters):
        for record in filled.read(topic):
            copy = kept[record.topic, record.partition, record.offset]
            assert (copy.key, copy.value, copy.timestamp) == (record.key, record.value, record.timestamp)


def test_only_some_topics(filled: Fleet, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, names = tmp_path / "log.jsonl", filled.names
    assert main(["record", str(path), *filled.flags, "--topics", "journal,parameters"]) == 0
    assert sorted(positions(path)) == [
        *((names.journal, 0, offset) for offset in range(120)),
        *((names.parameters, 0, offset) for offset in range(3)),
    ]
    assert names.journal in capsys.readouterr().out


def test_a_recording_until_a_future_time_ends_by_itself(filled: Fleet, tmp_path: Path) -> None:
    until = time.time_ns() // 1_000_000 + 1_500
    path = tmp_path / "log.jsonl"
    assert main(["record", str(path), *filled.flags, "--until", moment(until)]) == 0
    assert time.time_ns() // 1_000_000 >= until
    assert sorted(positions(path)) == sorted(there(filled))


def test_standard_output_takes_the_log(filled: Fleet) -> None:
    command = [sys.executable, "-m", "worker", "record", "-", *filled.flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    assert done.stdout.count(b"\n") == 726
    assert b"726 records" in done.stderr


def test_a_span_of_time_takes_the_parameters_before_it_along(fleet: Fleet, tmp_path: Path) -> None:
    fill(fleet, rounds=1)
    eventually(lambda: time.time_ns() // 1_000_000 > max(r.timestamp for r in fleet.read(fleet.names.journal)))
    begin = time.time_ns() // 1_000_000
    fill(fleet, rounds=1)
    last = max(record.timestamp for record in fleet.read(fleet.names.parameters))
    eventually(lambda: time.time_ns() // 1_000_000 > last)
    end = time.time_ns() // 1_000_000
    eventually(lambda: time.time_ns() // 1_000_000 > end)
    fill(fleet, rounds=1)
    path, said = tmp_path / "log.jsonl", tmp_path / "said.json"
    span = ["--from", moment(begin), "--until", moment(end)]
    assert main(["record", str(path), *fleet.flags, *span, "--json", str(said)]) == 0
    counts = orjson.loads(said.read_bytes())["topics"]
    whole = ("parameters", "parameters-history")  # from their beginning
    assert {name: counts.pop(name) for name in whole} == dict.fromkeys(whole, 2)
    assert counts == dict.fromkeys((name for name in TOPICS if name not in whole), 40)
    timed = [line.record for line in lines(path) if not line.record.topic.startswith(fleet.names.parameters)]
    assert all(begin <= record.timestamp < end for record in timed)


def moment(milliseconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(milliseconds / 1000)) + f".{milliseconds % 1000:03}Z"


def test_an_empty_log_and_markers_of_transactions(fleet: Fleet, tmp_path: Path) -> None:
    names = fleet.names

    def recorded(name: str) -> list[Line]:
        assert main(["record", str(tmp_path / name), *fleet.flags]) == 0
        return lines(tmp_path / name)

    assert recorded("empty.gz") == []
    # The mark of a transaction takes an offset, is no record, and does not delay the end.
    fleet.send_raw([(names.arrivals, b"a", b"1")], transaction=f"t-{names.prefix}")
    fleet.send_raw([(names.arrivals, b"a", b"2")])
    assert [line.record.value for line in recorded("marked.jsonl")] == [b"1", b"2"]


# ── live ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Recording:
    """A live recording."""

    def __init__(self, path: Path, arguments: list[str]) -> None:
        self.path = path
        self.process = subprocess.Popen(
            [sys.executable, "-m", "worker", "record", str(path), *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def holds(self, count: int) -> bool:
        assert self.process.poll() is None, self.process.communicate()
        if not self.path.exists():
            return False
        with LogReader(self.path, skip_bad=True) as log:  # the last line may be half written
            return sum(1 for _ in log) >= count

    def close(self) -> None:
        with self.process:
            self.process.kill()

    def end(self, sent: signal.Signals) -> int:
        self.process.send_signal(sent)
        self.process.communicate(timeout=300)
        return self.process.returncode


@pytest.mark.parametrize(("sent", "name"), [(signal.SIGINT, "log.gz"), (signal.SIGTERM, "log.jsonl")])
def test_a_live_recording_ends_at_a_signal_with_all_that_is_there(
    fleet: Fleet, tmp_path: Path, sent: signal.Signals, name: str
) -> None:
    fill(fleet, rounds=1)
    with closing(Recording(tmp_path / name, [*fleet.flags, "--live"])) as recording:
        eventually(lambda: recording.holds(241), what="the earlier records are in the log")
        fill(fleet, rounds=1)
        eventually(lambda: recording.holds(482), what="the new records are in the log")
        fill(fleet, rounds=1)  # and these just before the end
        assert recording.end(sent) == 0
    assert sorted(positions(recording.path)) == sorted(there(fleet))
    if name.endswith(".gz"):
        gzip.decompress(recording.path.read_bytes())  # whole: neither truncated nor without its checksum


# ── what cannot be done ──────────────────────────────────────────────────────────────────────────────────────────────


def test_a_log_that_exists_survives_topics_that_do_not(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b"precious")
    for at in (["--broker", address, "--prefix", "nowhere"], ["--broker", "127.0.0.1:1"]):
        assert main(["record", str(path), *at]) == 1
        assert capsys.readouterr().err.count("\n") == 1
    assert path.read_bytes() == b"precious"
