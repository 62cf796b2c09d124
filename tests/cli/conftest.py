"""Commands as a user runs them."""

from __future__ import annotations

import io
import logging
import shlex
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import orjson
import pytest

from worker.cli.main import main


class Terminal(io.StringIO):
    """A terminal, with typed text if it is read."""

    def isatty(self) -> bool:
        return True


class Ended(NamedTuple):
    """A command that has ended: its exit code, and what it wrote to standard output and to standard error."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The JSON that it wrote to standard output."""
        return orjson.loads(self.out)


@pytest.fixture(autouse=True)
def untouched_logging() -> Iterator[None]:
    """Put the root logger back as pytest has it."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)


@pytest.fixture
def adcascade(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """Return a function that runs a command line, with further arguments, in this process."""

    def run(line: str, *more: object) -> Ended:
        code = main([*shlex.split(line), *map(str, more)])
        return Ended(code, *capsys.readouterr())

    return run
