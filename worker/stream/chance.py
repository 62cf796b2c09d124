"""Repeatable chance: numbers that a stable hash draws for sessions, users, ads and values of features.

Numbers in [0, 1) come from a stable hash of the session: it draws the same numbers in every process and after every
crash; `salt` makes deployments differ. Each purpose has a hash of its own, so the choice of a session for random
display is independent of the arms that it then shows.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b
from typing import Literal
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from worker.bandit.arrays import Floats

_UNIT = 1.0 / (1 << 53)


def lottery(purpose: Literal["share", "control"], salt: str, units: Iterable[str]) -> Floats:
    """Return the numbers that select sessions for the `random_share`, or users or sessions for the control group.

    >>> lottery("share", "salt", ["a", "b"]).round(3), lottery("control", "salt", ["a"]).round(3)
    (array([0.361, 0.842]), array([0.217]))
    """
    start, digests = blake2b(digest_size=8, key=_key(salt), person=purpose.encode()), []
    for unit in units:
        digest = start.copy()  # in half the time that a new one takes
        digest.update(unit.encode())
        digests.append(digest.digest())
    return np.asarray((np.frombuffer(b"".join(digests), dtype="<u8") >> np.uint64(11)) * _UNIT, dtype=np.float64)


def hashed_column(name: str, value: str, columns: int) -> int:
    """Return the column, from 0, that a value of a hashed category marks: blake2b(value) mod columns.

    The key of the hash is made from the name of the feature, so equal values of two features are independent.

    >>> hashed_column("country", "DE", 16), hashed_column("country", "FR", 16), hashed_column("city", "DE", 16)
    (15, 6, 13)
    """
    key = blake2b(name.encode(), digest_size=32).digest()
    digest = blake2b(value.encode(), digest_size=8, key=key, person=b"feature").digest()
    return int.from_bytes(digest, "little") % columns


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
