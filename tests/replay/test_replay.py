"""Both replays reproduce a recorded run, for any order and repetition of its lines, in bounded memory."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import orjson
import pytest

from worker.errors import FailedError, InputError
from worker.kernels import fingerprint
from worker.logs.format import LogWriter, encode_line
from worker.replay.relearn import relearn
from worker.replay.verify import verify
from worker.stream.events import ArmChange, ArmEntry, Arrival, CatalogueChange
from worker.stream.explanation import explain
from worker.stream.features import Features
from worker.stream.folding import NEVER
from worker.stream.parameters import Parameters, decode_parameters
from worker.stream.settings import LearningSettings
from worker.stream.topology import Record, Topics
from worker.stream.versions import Versions

from ..embedded.traffic import restart_learner
from ..golden.recording import FACTS, GOLDEN, SETTINGS, START, Run, record
from .logs import (
    DEFAULTS,
    Document,
    Replay,
    change,
    hashes,
    is_reproduced,
    journal,
    lines_of,
    of,
    payload,
    recorded_hashes,
    shuffled,
    version,
)

both = pytest.mark.parametrize("how", [verify, relearn])


@both
def test_a_recorded_run_is_reproduced(lines: list[Document], final: Parameters, replayed: Replay, how: Replay) -> None:
    report = replayed(lines, how)
    assert report.mismatches == report.unverified == report.unfolded == report.stale == report.duplicates == 0
    assert report.events == len(lines)
    assert report.decisions == len(of(lines, "decisions")) > 500
    assert hashes(report) == recorded_hashes(lines)
    assert report.versions[-1].sha256 == final.sha256
    assert final.version > 8


def test_a_run_without_room_for_all_sessions_is_reproduced(tmp_path: Path, replayed: Replay) -> None:
    runner = record(tmp_path / "crowded", sessions=200, max_open_sessions=8)
    assert runner.tally.unremembered > 20
    lines = lines_of(tmp_path / "crowded")
    is_reproduced(lines, replayed)
    changed = next(line for line in of(lines, "decisions") if payload(line)["mode"] == "fallback")
    changed["payload"] = orjson.dumps({**payload(changed), "value": 0.5}).decode()
    assert replayed(lines).mismatches == 1


def test_a_run_with_uncertain_sessions_is_reproduced_without_learning_from_them(
    tmp_path: Path, replayed: Replay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Versions, "is_certain", lambda self, time, sent_at: time % 3 > 0)
    with LogWriter(tmp_path / "log") as log:
        run = Run(sessions=200, rate=4, seed=0, oddities=True, tap=log)
        for task in run.runner.tasks:
            task.take_over(0, 10**6)
        runner = run.go(())
    lines = lines_of(tmp_path / "log")
    assert 50 < len({p["session_id"] for p in map(payload, journal(lines, "opened")) if p.get("uncertain")}) < 90
    for report in is_reproduced(lines, replayed):
        assert report.sessions == runner.tally.opened
    for line in journal(lines, "opened"):
        change(line, uncertain=False)
    assert replayed(lines).mismatches > 0, "they are learned from now"


#: The defaults, with declared features and their crosses, and a budget that falls within a few windows.
EVERYTHING = {
    **DEFAULTS,
    "features": Features.of_table({"context": {"x": "number", "y": "number", "z": "number"}, "crosses": "all"}),
    "horizon_episodes": 5,
}


class Fickle(Run):
    """Users with named features, whose tastes are turned around after the first minute."""

    def _send(self, at: int, topic: str, name: str, value: bytes) -> None:
        if topic == self.topics.arrivals and value.startswith(b"{"):
            document = orjson.loads(value)
            value = orjson.dumps({**document, "context": dict(zip("xyz", document["context"], strict=True))})
        super()._send(at, topic, name, value)

    def odds(self, ad: int, context: tuple[float, ...], now: int) -> float:
        sign = 1 if now < START + 60_000 else -1
        return sign * (1.5 * context[ad % 3] + (ad % 2) * context[0] * context[1]) - 1


@pytest.mark.parametrize("changes", [{}, {"repeats": True}], ids=str)
def test_a_run_with_spread_positions_crosses_new_ads_and_change_is_reproduced(tmp_path, replayed, changes) -> None:
    entries = tuple(ArmEntry(arm=f"ad-{k}", reward=4.0 + k, active=True) for k in (6, 7, 8))
    orders = [
        (45_000, ArmChange(arm="ad-5", reward=2.5, active=True)),
        (63_200, CatalogueChange(changes=entries)),
        (108_000, ArmChange(arm="ad-9", reward=1.0, active=True)),
    ]
    with LogWriter(tmp_path / "log") as log:
        run = Fickle(sessions=1200, rate=10, seed=0, oddities=True, tap=log, settings=EVERYTHING | changes)
        newest = run.go(orders).versions.newest
    lines = lines_of(tmp_path / "log")
    published = [decode_parameters(line["payload"].encode()) for line in of(lines, "parameters")]
    versions = {one.version: one for one in published}
    grown = [one for one in versions.values() if one.version and len(one.arms) > len(versions[one.version - 1].arms)]
    assert len(grown) == 3
    for made in grown:
        before = versions[made.version - 1]
        assert 0 < max(made.thresholds) < NEVER
        assert made.thresholds != before.thresholds
    assert grown[1].clock < versions[grown[1].version - 1].clock
    assert any(one.kept < 1 or one.changed for one in versions.values()), "the change was noticed"
    assert newest.settings.spread == 1
    assert newest.model.position_effects.any()
    assert newest.rates is not None
    assert not newest.rates.are_all_one
    is_reproduced(lines, replayed)
    for session in map(payload, journal(lines, "opened")[::20]):
        served = versions[session["parameters_version"]]
        if session["modes"][0] in ("explore", "exploit"):
            who, context, exclude = session["session_id"], tuple(session["context"]), tuple(session["exclude"])
            reasons = explain(served, Arrival(session_id=who, occurred_at=0, context=context, exclude=exclude))
            assert list(reasons.slate) == session["slate"]
            assert [position.mode for position in reasons.positions] == session["modes"]
    last_order = lines.index(version(lines, grown[2].version)) + 1
    for part in (lines[len(lines) // 3 :], lines[:last_order]):
        for how in (verify, relearn):
            report = replayed(part, how)
            assert report.mismatches == 0, report.findings.as_json()
            assert report.versions[-1].sha256 == recorded_hashes(part)[report.versions[-1].version]
            assert report.versions[-1].version == max(recorded_hashes(part))


def by_topic(lines: list[Document]) -> list[Document]:
    """Topics one after the other, each from its end."""
    return sorted(lines, key=lambda line: (line["topic"], -line["partition"], -line["offset"]))


@both
@pytest.mark.parametrize("reorder", [shuffled, by_topic])
def test_order_and_repetition_of_lines_change_nothing(lines, replayed, how, reorder) -> None:
    before = replayed(lines, how).as_json()
    after = replayed(reorder(lines), how).as_json()
    repeated = after.pop("lines") - before.pop("lines")
    assert after.pop("duplicates") == repeated
    assert (repeated > 0) == (reorder is shuffled)
    before.pop("duplicates")
    assert after == before
    assert after["mismatches"] == 0


@both
def test_a_log_larger_than_memory_is_sorted_on_disk_if_there_is_room(lines, replayed, how, monkeypatch) -> None:
    in_memory = replayed(lines, how).as_json()
    monkeypatch.setattr("worker.logs.format.PRAGMAS", "PRAGMA cache_size = 10;")
    assert replayed(lines, how).as_json() == in_memory
    monkeypatch.setattr("worker.logs.format.PRAGMAS", "PRAGMA cache_size = 10; PRAGMA max_page_count = 40;")
    with pytest.raises(FailedError, match=r"cannot sort the log: .*full; set TMPDIR"):
        replayed(lines, how)


def test_the_prefix_selects_the_topics(lines: list[Document], replayed: Replay) -> None:
    for line in lines:
        line["topic"] = line["topic"].replace("ads.", "shop.eu.")
    other = {**lines[0], "topic": "ads.arrivals"}
    report = replayed([*lines, other], topics=Topics("shop.eu"))
    assert (report.mismatches, report.ignored, report.events) == (0, 1, len(lines))
    for wrong, hint in (lines, r"--prefix shop\.eu"), ([], "it has no records"):
        with pytest.raises(InputError, match=hint):
            replayed(wrong)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"policy": "aucbbp", "horizon_episodes": 10},
        {"policy": "epsilon-greedy"},
        {"repeats": False},
        {"unanswered": "passed", "forgetting": 0.9},
    ],
    ids=str,
)
def test_runs_under_other_settings_are_reproduced(tmp_path: Path, replayed: Replay, settings: dict[str, Any]) -> None:
    runner = record(tmp_path / "run", sessions=160, settings=settings)
    for report in is_reproduced(lines_of(tmp_path / "run"), replayed):
        assert report.versions[-1].sha256 == runner.versions.newest.sha256
        assert report.sessions == runner.tally.opened == 160
        assert report.clicks == runner.tally.clicks.total() > 0
        assert report.revenue == pytest.approx(runner.tally.reward)
        assert report.decisions == runner.tally.decisions.total()


@both
@pytest.mark.parametrize("share", [0.1, 0.7])
def test_a_log_may_end_anywhere(lines: list[Document], replayed: Replay, how: Replay, share: float) -> None:
    kept = lines[: int(len(lines) * share)]
    report = replayed(kept, how)
    assert report.mismatches == report.unverified == 0
    assert hashes(report) == recorded_hashes(kept)


def test_settings_may_change_with_a_restart_of_the_learner(replayed: Replay) -> None:
    """Each version is folded again under the settings that it carries."""
    lines: list[Document] = []

    def tap(record: Record, headers: Any) -> None:
        lines.append(orjson.loads(encode_line(record, headers)))

    run = Run(sessions=520, rate=4, seed=0, oddities=False, tap=tap)
    later, end = [entry for entry in run.agenda if entry[0] >= START + 60_000], run.last
    run.agenda, run.last = [entry for entry in run.agenda if entry[0] < START + 30_000], START + 30_000
    runner = run.go(())
    recorded = [(line["offset"], line["payload"].encode()) for line in of(lines, "journal")]
    restart_learner(runner, LearningSettings(**{**SETTINGS, "beta": 0.5, "ridge": 2.0}), recorded)
    run.agenda, run.last = later, end
    run.go(())
    assert {payload(line)["beta"] for line in of(lines, "parameters")} == {2.5, 0.5}
    report = replayed(lines)
    assert report.mismatches == report.unfolded == 0
    assert report.versions[-1].sha256 == runner.versions.newest.sha256


def test_the_golden_log_is_reproduced() -> None:
    """Decisions exactly; versions to 1e-9, and to the bit on the kind of machine that recorded them."""
    facts = orjson.loads(FACTS.read_bytes())
    report = verify(str(GOLDEN), tolerance=1e-9)
    assert [str(found) for found in report.findings.first] == []
    assert report.unverified == report.unfolded == 0
    assert report.decisions > 800
    newest = report.versions[-1]
    assert (newest.version, newest.sha256) == (facts["version"], facts["sha256"])
    if fingerprint() == facts["machine"]:
        for exact in (verify(str(GOLDEN)), relearn(str(GOLDEN))):
            assert exact.mismatches == 0
            assert exact.versions[-1].sha256 == facts["sha256"]


def test_the_golden_log_has_every_topic_mode_and_order() -> None:
    report = verify(str(GOLDEN))
    # An embedded runner has no history topic: its log has every version anyway.
    assert [topic for topic, count in report.topics.items() if not count] == ["parameters-history"]
    assert set(report.modes) >= {"warmup", "random", "explore"}
    kinds = {payload(line)["kind"] for line in of(lines_of(GOLDEN), "journal")}
    assert kinds == {"opened", "feedback", "progress", "arm", "command"}
    assert GOLDEN.stat().st_size < 300_000


@both
def test_memory_does_not_grow_with_the_log(tmp_path, plain, how, monkeypatch) -> None:
    """The same minute of traffic again and again: eight times the log, about the same memory."""
    monkeypatch.setattr("worker.replay.verify.BATCH", 64)
    monkeypatch.setattr("worker.replay.relearn.CHUNK", 256)
    options: dict[str, Any] = {"changes": {"window": 60_000}} if how is relearn else {}
    zero = of(plain.lines, "parameters")[0]
    minute = [(line, payload(line)) for line in of(plain.lines, "arrivals", "clicks", "decisions")]

    def peak(minutes: int) -> int:
        path = tmp_path / "log"
        with path.open("wb") as file:
            file.write(encode_line(Record("ads.parameters", 0, 0, 0, b"0", zero["payload"].encode())))
            for number in range(minutes):
                for line, fields in minute:
                    body = {**fields, "session_id": f"{fields['session_id']}-{number}"}
                    for name in {"occurred_at", "arrived_at"} & fields.keys():
                        body[name] += 60_000 * number
                    offset = line["offset"] + 10_000 * number
                    ts = line["ts"] + 60_000 * number
                    value = orjson.dumps(body)
                    file.write(encode_line(Record(line["topic"], line["partition"], offset, ts, b"", value)))
        tracemalloc.start()
        try:
            how(str(path), **options)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak(16) < 1.6 * peak(2)


@both
def test_what_is_far_ahead_of_its_record_is_passed_over_as_the_learner_did(lines, replayed, how) -> None:
    lines = lines[: len(lines) // 2]  # some windows are open
    before = replayed(lines, how)
    journal = of(lines, "journal")
    last, end = max(line["ts"] for line in journal), max(line["offset"] for line in journal) + 1
    far = last + 3_600_000
    kept = [payload(line) for line in journal if payload(line)["kind"] == "progress"]
    ahead = [{**one, "time": far} for one in kept[-max(one["partitions"] for one in kept) :]]
    some = next(payload(line) for line in journal if payload(line)["kind"] == "feedback")
    ahead.append({**some, "occurred_at": far + 86_400_000})
    records = [{**journal[-1], "offset": end + n, "ts": last, "payload": one} for n, one in enumerate(ahead)]
    arrival = of(lines, "arrivals")[-1]
    seconds = {**payload(arrival), "session_id": "in-seconds", "occurred_at": arrival["ts"] // 1000}
    records.append({**arrival, "offset": 10**6, "payload": seconds})
    after = replayed([*lines, *records], how)
    assert hashes(after) == hashes(before)
    assert after.mismatches == 0
    assert (after.first_at, after.last_at) == (before.first_at, before.last_at)
    # Without timestamps, they count: an hour later all windows are closed.
    for one in records:
        one["ts"] = -1
    assert len(replayed([*lines, *records], how).versions) > len(before.versions)
