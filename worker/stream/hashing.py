"""The stable hash of open categories: a value has the same column in every process and every release."""

from __future__ import annotations

from hashlib import blake2b


def hashed_column(name: str, value: str, columns: int) -> int:
    """Return the column, from 0, that a value of a hashed category marks: blake2b(value) mod columns.

    The key of the hash is made from the name of the feature, so equal values of two features are independent.

    >>> hashed_column("country", "DE", 16), hashed_column("country", "FR", 16), hashed_column("city", "DE", 16)
    (15, 6, 13)
    """
    key = blake2b(name.encode(), digest_size=32).digest()
    digest = blake2b(value.encode(), digest_size=8, key=key, person=b"feature").digest()
    return int.from_bytes(digest, "little") % columns
