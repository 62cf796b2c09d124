"""Exclusions in little memory, whatever the ids.

A list of 256 ids of 128 characters takes 50 KB as strings. A session in the table needs only to recognise its arrival:
a digest of the list. The learner needs to find the arms of the catalogue that are excluded: 8 bytes per id. Both are
stable hashes, so all workers and learners agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from hashlib import blake2b

_ID_BYTES = 8
_LIST_BYTES = 16
_KEPT = 2  # ids: a list that is no longer is kept as it is


def brief_exclusions(exclude: tuple[str, ...]) -> tuple[str, ...]:
    """Return a short list that is equal for equal lists only: the list itself, or its digest as the only entry.

    >>> brief_exclusions(("a", "b"))
    ('a', 'b')
    >>> digest = brief_exclusions(("a", "b", "c"))
    >>> len(digest), brief_exclusions(digest) == digest
    (1, True)
    """
    if len(exclude) <= _KEPT:
        return exclude
    # Ids of arrivals have no control characters: the joined text belongs to one list, and a digest is no id.
    return ("\0" + blake2b("\0".join(exclude).encode(), digest_size=_LIST_BYTES).hexdigest(),)


def pack_exclusions(exclude: tuple[str, ...]) -> bytes:
    """Pack excluded arms, 8 bytes each, in their order."""
    return b"".join(map(_hashed, exclude)) if exclude else b""


def packed_indices(indices: Mapping[str, int]) -> dict[bytes, int]:
    """Return the indices of arms by their packed ids, for `excluded_indices`."""
    return {_hashed(arm): index for arm, index in indices.items()}


def excluded_indices(packed: bytes, indices: Mapping[bytes, int]) -> list[int]:
    """Return the indices of packed arms; arms that have none are left out.

    >>> excluded_indices(pack_exclusions(("b", "unknown")), packed_indices({"a": 0, "b": 1}))
    [1]
    """
    ids = (packed[start : start + _ID_BYTES] for start in range(0, len(packed), _ID_BYTES))
    return [indices[one] for one in ids if one in indices]


@lru_cache(maxsize=16_384)
def _hashed(arm: str) -> bytes:
    return blake2b(arm.encode(), digest_size=_ID_BYTES).digest()
