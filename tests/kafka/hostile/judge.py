"""The judge: compares what was sent (the ledger) with what is in the raw topics (the oracle). A finding is a line."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from tests.kafka.fleet import ROOT
from tests.kafka.hostile.driver import ADS
from tests.kafka.hostile.fleet import LATENESS, SESSION_TIMEOUT
from tests.kafka.hostile.ledger import Ledger, Sent
from tests.kafka.hostile.oracle import Journal, Raw, Window, closed_windows, is_uncertain

MOST_LINES: Final = 8
#: Fields of a version that tell its position; all others are its content.
POSITION: Final = ("made_at", "effective_at", "window_end", "journal_offset", "resume_offset", "progress")
KNOWN_ADS: Final = {*ADS, "ad-x"}


class Judge:
    """The evidence of a run, and what must hold."""

    def __init__(self, topics: dict[str, list[Raw]], ledger: Ledger) -> None:
        self.topics, self.ledger = topics, ledger
        self.journal = Journal.of(self.topics["journal"])
        self.windows = closed_windows(self.topics, self.journal, SESSION_TIMEOUT)
        #: The raw inputs, by topic, partition and offset.
        self.inputs: dict[tuple[str, int, int], Sent | None] = {
            (topic, raw.partition, raw.offset): ledger.sent.get((topic, raw.key, raw.digest))
            for topic in ("arrivals", "clicks")
            for raw in self.topics[topic]
        }
        self.present = [sent for sent in self.inputs.values() if sent is not None]

    def findings(self) -> list[str]:
        """Return everything that does not hold."""
        checks = (
            self.everything_sent_is_there,
            self.every_arrival_is_answered,
            self.the_facts_are_those_of_the_inputs,
            self.every_bad_record_is_a_dead_letter,
            self.every_window_counts_once,
            self.what_came_in_time_counts,
            self.one_content_per_version,
        )
        found: list[str] = []
        for check in checks:
            lines = list(check())
            found += [f"{check.__name__}: {line}" for line in lines[:MOST_LINES]]
            found += [f"{check.__name__}: and {len(lines) - MOST_LINES} more"] if len(lines) > MOST_LINES else []
        return found

    def valid(self, topic: str) -> Iterator[tuple[dict[str, Any], Sent]]:
        """Yield the content of every valid record that is in a topic."""
        for sent in {id(one): one for one in self.present}.values():
            if sent.topic == topic and sent.is_valid:
                assert sent.body is not None
                yield sent.body, sent

    # ── what must hold ───────────────────────────────────────────────────────────────────────────────────────────────

    def everything_sent_is_there(self) -> Iterator[str]:
        there = {id(sent) for sent in self.present}
        for sent in self.ledger.sent.values():
            if sent.acknowledged and id(sent) not in there:
                yield f"the broker has lost a record: {sent}"
        for (topic, partition, offset), found in self.inputs.items():
            if found is None:
                yield f"nobody sent the record at {topic}, partition {partition}, offset {offset}"

    def every_arrival_is_answered(self) -> Iterator[str]:
        decisions: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
        for raw in self.topics["decisions"]:
            body = raw.body
            decisions[body["session_id"], body["arrived_at"]].append(body)
        for body, _ in self.valid("arrivals"):
            answers = decisions.get((body["session_id"], body["occurred_at"]), [])
            if not answers:
                yield f"no decision for {body}"
            for answer in answers:
                wrong = set(answer["slate"]) - KNOWN_ADS | set(answer["slate"]) & set(body.get("exclude", ()))
                if wrong or answer["arm"] != (answer["slate"] or [None])[0]:
                    yield f"a wrong decision for {body}: {answer}"

    def the_facts_are_those_of_the_inputs(self) -> Iterator[str]:
        arrived = {(b["session_id"], b["occurred_at"], tuple(b["context"])) for b, _ in self.valid("arrivals")}
        opened = {(*session, context) for session, several in self.journal.contexts.items() for context in several}
        answered = {_answer(body) for body, _ in self.valid("clicks")}
        facts = {(session, *answer) for session, several in self.journal.answers.items() for answer in several}
        for what, expected, found in (("arrival", arrived, opened), ("feedback", answered, facts)):
            yield from (f"the journal lacks the {what} {one}" for one in expected - found)
            yield from (f"the journal has {what} that nobody sent: {one}" for one in found - expected)

    def every_bad_record_is_a_dead_letter(self) -> Iterator[str]:
        letters: dict[tuple[str, int, int], set[str]] = defaultdict(set)
        for raw in self.topics["dead-letters"]:
            place = _place(raw)
            reason = raw.headers["adcascade.reason"].decode()
            letters[place].add(reason)
            sent = self.inputs.get(place)
            if sent is None:
                yield f"a dead letter of a record that is not there: {place}, {reason}"
            elif sent.is_valid and not self._has_another_slate(sent, reason):
                yield f"a valid record is a dead letter: {place}, {reason} {raw.headers['adcascade.error']!r}, {sent}"
            elif not sent.is_valid and reason not in sent.reasons:
                yield f"{sent.what} in {sent.topic} is a dead letter for {reason}, not for {sorted(sent.reasons)}"
        for place, sent in self.inputs.items():
            if sent is not None and not sent.is_valid and place not in letters:
                yield f"no dead letter for {sent.what} at {place}, expected {sorted(sent.reasons)}"

    def _has_another_slate(self, sent: Sent, reason: str) -> bool:
        """Whether feedback does not fit the slate in the table because its session was planned twice.

        An arrival that comes again, after a crash or after its session has ended, is planned again, perhaps under a
        newer version. Such a session is uncertain.
        """
        assert sent.body is not None
        same_id = [facts for (session, _), facts in self.journal.opened.items() if session == sent.body["session_id"]]
        return reason in ("arm-mismatch", "position") and any(map(is_uncertain, same_id))

    def every_window_counts_once(self) -> Iterator[str]:
        for window in self.windows:
            said = {name: window.said[name] for name in window.counts}
            if said != window.counts:
                yield f"version {window.version}, window {window.start}: counted {said}, expected {window.counts}"
            if self.journal.watermark(window.closed_at) < window.end + SESSION_TIMEOUT + LATENESS:
                yield f"version {window.version}: the window {window.start} was closed before its time"
        taken = [session for window in self.windows for session in window.sessions]
        if len(taken) != len(set(taken)):
            yield "a session is in two windows"
        folded = sum(len(shown) for one in self.windows if _is_folded(one) for shown in one.sessions.values())
        last = self.last_version
        if last["observations"] != folded:
            yield f"version {last['version']} has {last['observations']} observations, expected {folded}"

    def what_came_in_time_counts(self) -> Iterator[str]:
        """Feedback that the broker had within the lateness counts, whatever happened to the workers since."""
        window_of = {session: window for window in self.windows for session in window.sessions}
        arrivals = {}
        for body, sent in self.valid("arrivals"):
            session = body["session_id"], body["occurred_at"]
            if sent.acknowledged and sent.acknowledged - body["occurred_at"] <= LATENESS:
                arrivals[body["session_id"]] = session
                # A window in which all sessions are uncertain has no episode.
                if session not in window_of and not is_uncertain(self.journal.opened[session]):
                    yield f"{session} is in no window, although it came in time"
        for body, sent in self.valid("clicks"):
            found = arrivals.get(body["session_id"])
            if found is None or found not in window_of or not sent.acknowledged:
                continue
            if sent.acknowledged - body["occurred_at"] > LATENESS or body["occurred_at"] > found[1] + SESSION_TIMEOUT:
                continue
            answer = _answer(body)
            offset = self.journal.answers.get(answer[0], {}).get(answer[1:])
            if offset is None or offset > window_of[found].closed_at:
                yield f"{answer} came in time and was not counted; it stands at {offset} in the journal"

    def one_content_per_version(self) -> Iterator[str]:
        contents: dict[int, dict[str, Any]] = {}
        for raw in self.topics["parameters"]:
            body = raw.body
            content = {name: value for name, value in body.items() if name not in POSITION}
            known = contents.setdefault(body["version"], content)
            if known != content:
                fields = [name for name in content if known.get(name) != content[name]]
                yield f"version {body['version']} has two contents; they differ in {', '.join(fields)}"
        for one, two in itertools.pairwise(sorted(contents)):
            if two != one + 1:
                yield f"version {two} follows {one}"
            elif contents[two]["parent_sha256"] != contents[one]["sha256"]:
                yield f"version {two} does not continue version {one}"

    @property
    def last_version(self) -> dict[str, Any]:
        return max((raw.body for raw in self.topics["parameters"]), key=lambda body: body["version"])

    def summary(self) -> str:
        counts = ", ".join(f"{name} {len(records)}" for name, records in self.topics.items())
        last = self.last_version
        return f"{counts}; version {last['version']} with {last['observations']} observations, {last['sha256'][:12]}"


def replayed(folder: Path, flags: list[str], last: dict[str, Any]) -> list[str]:
    """Record the topics and verify the log; return what is wrong."""
    log, report = folder / "log.jsonl", folder / "replay.json"
    for command in (
        ["record", str(log), *flags],
        ["replay", str(log), "--verify", *flags[2:], "--json", str(report)],
    ):
        done = subprocess.run(
            [sys.executable, "-m", "worker", *command], cwd=ROOT, capture_output=True, text=True, check=False
        )
        if done.returncode:
            return [f"adcascade {command[0]} ended with {done.returncode}: {done.stdout[-1500:]}{done.stderr[-1500:]}"]
    found = json.loads(report.read_text(encoding="utf-8"))
    wrong = [f"replay: {name} is {found[name]}" for name in ("mismatches", "unverified") if found[name]]
    if found["versions"][-1]["sha256"] != last["sha256"]:
        wrong.append(f"replay ends with {found['versions'][-1]}, not with {last['sha256']}")
    return wrong


def _answer(body: dict[str, Any]) -> tuple[str, int, int, str, bool]:
    return body["session_id"], body["occurred_at"], body["position"], body["arm"], body["clicked"]


def _place(raw: Raw) -> tuple[str, int, int]:
    """Return topic, partition and offset of the record that a dead letter is about."""
    topic = raw.headers["adcascade.topic"].decode().rpartition(".")[2]
    return topic, int(raw.headers["adcascade.partition"]), int(raw.headers["adcascade.offset"])


def _is_folded(window: Window) -> bool:
    return not window.said["frozen"] and window.said.get("rejected") is None
