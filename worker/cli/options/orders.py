"""The version after an order, as the commands that give orders report it."""

from __future__ import annotations

import time
from datetime import datetime
from typing import Any

from worker.stream.parameters import Parameters


def version_facts(after: Parameters) -> dict[str, Any]:
    """Return what the JSON of a command has of the version after an order."""
    return {"version": after.version, "sha256": after.sha256, "effective_at": after.effective_at}


def in_force(after: Parameters, now: float | None = None) -> str:
    """Return from when a version serves, for people; `now` in milliseconds.

    >>> from worker.stream.settings import LearningSettings
    >>> in_force(Parameters.first(LearningSettings(dim=1), ()), now=5)
    'version 0 serves sessions that arrive from now on; open sessions keep their slates'
    """
    now = time.time() * 1000 if now is None else now
    wait, start = after.effective_at - now, datetime.fromtimestamp(after.effective_at / 1000).astimezone()
    today = datetime.fromtimestamp(now / 1000).astimezone().date()
    moment = (
        f"{start:%H:%M:%S}.{start.microsecond // 100_000}" if start.date() == today else f"{start:%Y-%m-%d %H:%M:%S}"
    )
    when = "now" if wait <= 0 else f"{moment}" + (f" (in {wait / 1000:.1f} s)" if wait < 86_400_000 else "")
    return f"version {after.version} serves sessions that arrive from {when} on; open sessions keep their slates"
