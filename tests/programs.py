"""Programs that tests need or start: find them or skip the test, and wait for what they do."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable
from typing import NoReturn, TypeVar

import pytest

#: There, a missing program is a failure.
IN_CI = os.environ.get("CI", "").lower() in ("1", "true")
_T = TypeVar("_T")


def needs(*commands: str, package: str) -> str:
    """Return the path of the first installed command; without any, skip the test, or fail it under CI=true."""
    for command in commands:
        if (path := shutil.which(command)) is not None:
            return path
    return lacking(f"{commands[0]} is not installed (Debian: apt-get install {package})")


def lacking(reason: str) -> NoReturn:
    """Skip the test; under CI=true fail it."""
    if IN_CI:
        pytest.fail(f"{reason}; under CI=true that is a failure")
    pytest.skip(reason)


def eventually(condition: Callable[[], _T], *, within: float = 300.0, what: str = "") -> _T:
    """Return the first true value of the condition; fail if it is stuck, on the slowest machine."""
    deadline = time.monotonic() + within
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {within:g} s: {what or condition}"
        time.sleep(0.05)  # between two looks, not for something to happen
    return value


async def until(condition: Callable[[], object]) -> None:
    """Let other tasks and threads run until a condition holds; the time limit is that of the test."""
    while not condition():  # noqa: ASYNC110 - the test has a deadline
        await asyncio.sleep(0.001)


def show(text: str) -> None:
    """Write a figure where `pytest -s` shows it."""
    sys.stdout.write(f"\n{text}")


def free_port() -> int:
    """Return a port that is free at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
