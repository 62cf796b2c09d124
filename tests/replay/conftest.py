"""Recorded runs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from worker.replay.report import ReplayReport
from worker.replay.verify import verify
from worker.stream.parameters import Parameters

from ..golden.recording import record
from .logs import Document, Recorded, Replay, lines_of, write


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """A run with orders and oddities."""
    path = tmp_path_factory.mktemp("recorded") / "log.gz"
    return Recorded(final=record(path, sessions=240).versions.newest, lines=lines_of(path))


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """A run without orders and oddities: arrivals and clicks determine everything else."""
    path = tmp_path_factory.mktemp("plain") / "log"
    final = record(path, sessions=160, orders=(), oddities=False).versions.newest
    return Recorded(final=final, lines=lines_of(path))


@pytest.fixture
def lines(recorded: Recorded) -> list[Document]:
    """The lines of the run with orders and oddities; a test may change them."""
    return recorded.copy()


@pytest.fixture
def final(recorded: Recorded) -> Parameters:
    return recorded.final


@pytest.fixture
def replayed(tmp_path: Path) -> Replay:
    """Replay lines; verify them by default."""

    def replay(lines: Iterable[Document], how: Replay = verify, **options: Any) -> ReplayReport:
        return how(write(tmp_path / "log", lines), **options)

    return replay
