"""Repeatable chance: numbers in [0, 1) from a stable hash of the session.

A session draws the same numbers in every process and after every crash; `salt` makes deployments differ. Each purpose
has a hash of its own, so the choice of a session for random display is independent of the arms that it then shows.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b

import numpy as np

from worker.bandit.arrays import Floats

_UNIT = 1.0 / (1 << 53)


def lottery(salt: str, session_id: str) -> float:
    """Return the number that selects a session for the `random_share`.

    >>> lottery("salt", "a") == lottery("salt", "a") != lottery("salt", "b")
    True
    """
    digest = blake2b(session_id.encode(), digest_size=8, key=_key(salt), person=b"share").digest()
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


@lru_cache(maxsize=16)
def _key(salt: str) -> bytes:
    return blake2b(salt.encode(), digest_size=32).digest()
