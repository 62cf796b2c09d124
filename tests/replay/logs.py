"""Lines of a log as documents, to be selected, changed and replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson

from worker.logs.format import LogReader, encode_line
from worker.replay.relearn import relearn
from worker.replay.report import ReplayReport
from worker.replay.verify import verify
from worker.stream.parameters import Parameters
from worker.stream.settings import LearningSettings

from ..stream.scenes import ADDITIVE

#: The defaults of a deployment, instead of the plain settings of the golden run.
DEFAULTS = {name: getattr(LearningSettings(dim=3), name) for name in ADDITIVE}

Document = dict[str, Any]
Replay = Callable[..., ReplayReport]


class Recorded(NamedTuple):
    """The lines of a run, and its last version."""

    lines: list[Document]
    final: Parameters

    def copy(self) -> list[Document]:
        lines: list[Document] = orjson.loads(orjson.dumps(self.lines))
        return lines


def lines_of(path: Path) -> list[Document]:
    with LogReader(path) as log:
        return [orjson.loads(encode_line(line.record, line.headers)) for line in log]


def write(path: Path, lines: Iterable[Document]) -> str:
    path.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    return str(path)


def of(lines: Iterable[Document], *names: str) -> list[Document]:
    return [line for line in lines if line["topic"].removeprefix("ads.") in names]


def without(lines: Iterable[Document], *names: str) -> list[Document]:
    return [line for line in lines if line["topic"].removeprefix("ads.") not in names]


def payload(line: Document) -> Document:
    document: Document = orjson.loads(line["payload"])
    return document


def journal(lines: Iterable[Document], kind: str) -> list[Document]:
    return [line for line in of(lines, "journal") if payload(line)["kind"] == kind]


def version(lines: Iterable[Document], number: int) -> Document:
    return next(line for line in of(lines, "parameters") if payload(line)["version"] == number)


def served_by(lines: Iterable[Document], number: int) -> int:
    return sum(payload(line)["parameters_version"] == number for line in of(lines, "decisions"))


def change(line: Document, **fields: Any) -> None:
    line["payload"] = orjson.dumps({**payload(line), **fields}).decode()


def decision(lines: Iterable[Document], position: int) -> Document:
    """Return a decision for a position, from the middle of the log."""
    found = [line for line in of(lines, "decisions") if payload(line)["position"] == position]
    return found[len(found) // 2]


def shuffled(lines: Sequence[Document]) -> list[Document]:
    """Shuffle lines within one second of event time, and repeat a third of them."""
    generator = np.random.default_rng(1)
    doubled = [*lines, *(line for line in lines if generator.random() < 1 / 3)]
    keys = [line["ts"] + generator.uniform(0, 1000) for line in doubled]
    return [doubled[index] for index in np.argsort(keys)]


def is_reproduced(lines: Sequence[Document], replayed: Replay) -> list[ReplayReport]:
    """Check that both replays give the recorded decisions and versions; return their reports."""
    reports = [replayed(lines, how) for how in (verify, relearn)]
    for report in reports:
        assert report.mismatches == report.unverified == report.unfolded == 0, report.findings.as_json()
        assert hashes(report) == recorded_hashes(lines)
    return reports


def hashes(report: ReplayReport) -> dict[int, str]:
    return {version.version: version.sha256 for version in report.versions}


def recorded_hashes(lines: Iterable[Document]) -> dict[int, str]:
    return {payload(line)["version"]: payload(line)["sha256"] for line in of(lines, "parameters")}
