"""The settings of the first release, for tests whose numbers are of its click model."""

from __future__ import annotations

from typing import Any

FIRST_RELEASE: dict[str, Any] = {
    "repeats": True,
    "model": "additive",
    "intercept": False,
    "answers": "all",
    "standardise": False,
    "learn_at_most": 0,
    "policy": "ucbbp",
    "bonus": "value",
    "beta": 2.5,
    "ridge": 0.5,
}
