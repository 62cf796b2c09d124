"""Repeatable chance, and the budget of learning that is drawn by it: which sessions are journaled.

Numbers in [0, 1) come from a stable hash of the session: it draws the same numbers in every process and after every
crash; `salt` makes deployments differ. Each purpose has a hash of its own, so the choice of a session for random
display is independent of the arms that it then shows.

The learner folds at most `learn_at_most` sessions per window, about. Beyond that, serving journals a sample. Rules
(docs/design.md §3 and §4):

- Every fold publishes two shares from the counts of its window: of the sessions that explore, and of the others.
  Exploring ones come first, because they teach the most. Slates drawn uniformly count as exploring.
- The control group is journaled whole, and comes on top of the budget: it is small, and what it earns is measured.
- A session is journaled iff its number is below the share of its slate under the version that planned it. Context and
  slate decide, never the answers. So the estimate needs no weights (docs/math.md §11).
- A session that is uncertain (`serving.py`) is journaled in any case: an earlier owner may have journaled it without
  the mark.
- A journaled session stands for 1/share sessions wherever sessions are counted or ranked.
- How many sessions there were is counted by serving, per partition and window of arrival, and comes with progress.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from functools import lru_cache
from hashlib import blake2b
from typing import Final, NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from worker.bandit.arrays import Floats
from worker.errors import InputError
from worker.stream.events import Mode

_UNIT = 1.0 / (1 << 53)


def lottery(salt: str, session_id: str) -> float:
    """Return the number that selects a session for the `random_share`.

    >>> lottery("salt", "a") == lottery("salt", "a") != lottery("salt", "b")
    True
    """
    return _number(salt, session_id, b"share")


def control_number(salt: str, unit: str) -> float:
    """Return the number that selects a unit, a user or else a session, for the control group.

    >>> control_number("salt", "a") != lottery("salt", "a")
    True
    """
    return _number(salt, unit, b"control")


def journal_number(salt: str, session_id: str) -> float:
    """Return the number that selects a session for the journal, where only a share is journaled.

    >>> journal_number("salt", "a") != lottery("salt", "a")
    True
    """
    return _number(salt, session_id, b"journal")


def hashed_column(name: str, value: str, columns: int) -> int:
    """Return the column, from 0, that a value of a hashed category marks: blake2b(value) mod columns.

    The key of the hash is made from the name of the feature, so equal values of two features are independent.

    >>> hashed_column("country", "DE", 16), hashed_column("country", "FR", 16), hashed_column("city", "DE", 16)
    (15, 6, 13)
    """
    key = blake2b(name.encode(), digest_size=32).digest()
    digest = blake2b(value.encode(), digest_size=8, key=key, person=b"feature").digest()
    return int.from_bytes(digest, "little") % columns


def _number(salt: str, session_id: str, purpose: bytes) -> float:
    digest = blake2b(session_id.encode(), digest_size=8, key=_key(salt), person=purpose).digest()
    return (int.from_bytes(digest, "little") >> 11) * _UNIT


def session_uniforms(salt: str, session_ids: list[str], horizon: int) -> Floats:
    """Return two numbers for every session and position, (n, H, 2): a coin, and which arm.

    >>> session_uniforms("salt", ["a", "b"], 3).shape
    (2, 3, 2)
    """
    key = _key(salt)
    digests = []
    for session_id in session_ids:
        name = session_id.encode()
        for first in range(0, horizon, 4):  # a digest of 64 bytes serves four positions
            salted = first.to_bytes(8, "little")
            digests.append(blake2b(name, digest_size=64, key=key, person=b"arms", salt=salted).digest())
    words = np.frombuffer(b"".join(digests), dtype="<u8").reshape(len(session_ids), -1, 2)[:, :horizon]
    return np.asarray((words >> np.uint64(11)) * _UNIT, dtype=np.float64)


def stable_keys(names: Iterable[str], salt: str = "") -> NDArray[np.uint32]:
    """Return a number for each name, by which sessions spread their optimism over arms.

    >>> stable_keys(["a", "b"]).tolist()
    [3904355907, 1908338681]
    """
    start = crc32(salt.encode())
    return np.fromiter((crc32(name.encode(), start) for name in names), dtype=np.uint32)


@lru_cache(maxsize=64)
def _key(salt: str) -> bytes:
    return blake2b(salt.encode(), digest_size=32).digest()


#: The least share of sessions that do not explore, in units of the share that all would have without an order.
LEAST_OF_OTHERS: Final = 0.1

_EXPLORING: Final[frozenset[Mode]] = frozenset(("explore", "warmup", "random"))


class Shares(NamedTuple):
    """The shares of the sessions that explore, and of the others, that are journaled.

    >>> Shares.of(sessions=50_000, exploring=1_000.0, at_most=5_000)
    Shares(exploring=1.0, others=0.08163265306122448)
    >>> Shares.of(sessions=50_000, exploring=50_000.0, at_most=5_000)
    Shares(exploring=0.1, others=0.01)
    >>> Shares.of(sessions=5_000, exploring=0.0, at_most=5_000) == Shares.of(sessions=5_000, exploring=0.0, at_most=0)
    True
    """

    exploring: float = 1.0
    others: float = 1.0

    @classmethod
    def of(cls, *, sessions: int, exploring: float, at_most: int) -> Shares:
        """Return the shares by which such a window would have had `at_most` journaled sessions; 0: no limit."""
        if not at_most or sessions <= at_most:
            return cls()
        exploring = min(exploring, float(sessions))
        rest = sessions - exploring
        least = LEAST_OF_OTHERS * at_most / sessions
        if rest and (others := (at_most - exploring) / rest) >= least:
            return cls(1.0, others)
        return cls(min(1.0, (at_most - least * rest) / exploring), least)

    def check(self) -> None:
        """Raise `InputError` if these are not two shares."""
        if not all(isinstance(share, float) and 0 < share <= 1 for share in self):
            raise InputError(f"shares must be above 0 and at most 1, not {tuple(self)}")

    def of_slate(self, modes: Collection[Mode]) -> float:
        """Return the share of the sessions with such a slate; the control group is journaled whole."""
        if "control" in modes:
            return 1.0
        return self.exploring if is_exploring(modes) else self.others


ALL: Final = Shares()


def is_exploring(modes: Collection[Mode]) -> bool:
    """Return whether a slate explores at any position, or was drawn uniformly.

    >>> is_exploring(("exploit", "explore")), is_exploring(("warmup",)), is_exploring(("exploit",) * 2)
    (True, True, False)
    """
    return not _EXPLORING.isdisjoint(modes)


def journaled(salt: str, session_id: str, share: float) -> float | None:
    """Return what a session remembers of its share: None if it was certain, the share if journaled, 0 if not.

    >>> journaled("salt", "a", 1.0), journaled("salt", "a", 0.9), journaled("salt", "a", 0.1)
    (None, 0.9, 0.0)
    """
    if share >= 1:
        return None
    return share if journal_number(salt, session_id) < share else 0.0


class OpenedCounts:
    """The sessions that a partition has opened, by the start of the window of their arrival.

    After a crash, counting starts from the sessions in the table. These are all of a window until one is deleted, and
    by then progress beyond its deadline is in the journal, with the count. The learner takes the highest count. So
    nothing is missing if a window is no longer than session_timeout + lateness; of a longer one, sessions that were
    deleted before the crash may be.
    """

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def add(self, arrived_at: int, window: int) -> None:
        """Count a session."""
        self._counts[arrived_at - arrived_at % window] += 1

    def drop(self, until: int) -> None:
        """Drop the windows that began before this time."""
        for start in [start for start in self._counts if start < until]:
            del self._counts[start]

    def clear(self) -> None:
        """Drop everything."""
        self._counts.clear()

    def report(self) -> tuple[tuple[int, int], ...]:
        """Return starts and counts, in the order of time."""
        return tuple(sorted(self._counts.items()))
