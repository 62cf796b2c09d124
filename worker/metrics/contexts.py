"""Contexts of recent users: a small sample, for averages over users and for the check of the features' scale."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Final

import numpy as np

#: Contexts that are kept.
MOST_CONTEXTS: Final = 256
#: Seconds between two contexts, once so many are kept: together they cover at least a minute.
BETWEEN_CONTEXTS: Final = 0.25
#: Absolute value above which a feature is too large, and norm below which a context is too small. A context of zeros is
#: a user without features.
LARGEST_FEATURE: Final = 10.0
SMALLEST_NORM: Final = 0.01


class RecentContexts:
    """A sample of packed contexts, the oldest first; not thread-safe, the owner holds a lock."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kept: deque[bytes] = deque(maxlen=MOST_CONTEXTS)
        self._taken = float("-inf")

    def offer(self, context: bytes) -> bool:
        """Keep a context if one is due; return whether it was kept."""
        now = self._clock()
        if len(self._kept) == MOST_CONTEXTS and now - self._taken < BETWEEN_CONTEXTS:
            return False
        self._taken = now
        self._kept.append(context)
        return True

    def newest(self) -> tuple[bytes, ...]:
        """Return the contexts that are as long as the newest."""
        return tuple(one for one in self._kept if len(one) == len(self._kept[-1]))


def wrong_scale(context: bytes) -> str | None:
    """Return what is wrong with the scale of a packed context, or None.

    >>> from worker.stream.contexts import pack_context
    >>> wrong_scale(pack_context((0.5, -52_000.0)))
    'feature 2 of 2 is about -50,000'
    >>> wrong_scale(pack_context((0.0, 1.0)))
    """
    features = np.frombuffer(context, "<f8")
    if not len(features):
        return None
    largest = int(np.argmax(np.abs(features)))
    if abs(features[largest]) > LARGEST_FEATURE:
        return f"feature {largest + 1} of {len(features)} is about {float(f'{features[largest]:.0e}'):,.0f}"
    if 0.0 < (norm := float(np.linalg.norm(features))) < SMALLEST_NORM:
        return f"the norm of a context is {norm:.0e}"
    return None
