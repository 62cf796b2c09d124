"""Programs and packages that only tests need: find them, or skip the test."""

from __future__ import annotations

import os
import shutil
from typing import NoReturn

import pytest


def needs(*commands: str, package: str) -> str:
    """Return the path of the first installed command; without any, skip the test, or fail it under CI=true."""
    for command in commands:
        if (path := shutil.which(command)) is not None:
            return path
    return lacking(f"{commands[0]} is not installed (Debian: apt-get install {package})")


def lacking(reason: str) -> NoReturn:
    """Skip the test; under CI=true fail it."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"{reason}; under CI=true that is a failure")
    pytest.skip(reason)
