"""The default partitioner of the Java client, to compare that of librdkafka with."""

from __future__ import annotations

from struct import unpack_from
from typing import Final

_MASK: Final = 0xFFFFFFFF


def murmur2_partition(key: bytes, partitions: int) -> int:
    """Return the partition of a key by murmur2, the default of the Java client.

    >>> murmur2_partition(b"s-1", 8)
    7
    """
    length = len(key)
    whole = length & ~3
    mixed = 0x9747B28C ^ length
    for word in unpack_from(f"<{whole // 4}I", key):
        word = word * 0x5BD1E995 & _MASK
        mixed = (mixed * 0x5BD1E995 & _MASK) ^ ((word ^ word >> 24) * 0x5BD1E995 & _MASK)
    if whole < length:
        mixed = (mixed ^ int.from_bytes(key[whole:], "little")) * 0x5BD1E995 & _MASK
    mixed = (mixed ^ mixed >> 13) * 0x5BD1E995 & _MASK
    return ((mixed ^ mixed >> 15) & 0x7FFFFFFF) % partitions
