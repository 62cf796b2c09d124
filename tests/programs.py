"""Programs that tests need and the product does not: where they are, or why a test is skipped."""

from __future__ import annotations

import os
import shutil
from typing import NoReturn

import pytest


def needs(*commands: str, package: str) -> str:
    """Return the path of the first command there is; without any, skip the test, or fail it under CI=true."""
    for command in commands:
        if (path := shutil.which(command)) is not None:
            return path
    return _lacking(f"{commands[0]} is not installed (Debian: apt-get install {package})")


def _lacking(reason: str) -> NoReturn:
    if os.environ.get("CI") == "true":
        pytest.fail(f"{reason}; under CI=true that is a failure")
    pytest.skip(reason)
