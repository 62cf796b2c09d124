"""Arrays of a version as text: float64, or five bytes per number where a version has many.

The sums of information of an ad are most of a version of many ads, and few of their 52 bits of mantissa say anything.
So a version has them as **float40**: sign, exponent and mantissa as in float32, and eight more bits of mantissa.

Rules that hold in this file:

- A version is rounded when it is made (`rounded`), never when it is written: what is published is what its maker goes
  on with, so a restart, a worker and a replay have the same bits.
- Rounding is to the nearest, to even in between: the relative error of a number is at most ε = 2⁻³² and has no
  tendency over many folds. With |G_ij| ≤ sqrt(G_ii G_jj), the error E of an ad's information G has
  |vᵀEv| ≤ ε tr(G) |v|². So Λ + G stays positive definite unless the information is a billion times that of the prior:
  in standardised contexts, after hundreds of millions of displays of an ad. The gate of a fold checks it.
- Numbers below 2⁻¹²⁶ become 0. One beyond 2¹²⁸ is refused.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

import numpy as np
from msgspec import Meta, Struct

from worker.bandit.arrays import Floats
from worker.bandit.click_model import ClickModel
from worker.errors import EstimationError
from worker.stream.events import Count, described

#: Arrays of models that a version has as float40.
SHORT: Final = frozenset({"precision.information", "precision.crossing", "precision.inherited"})
SHORT_BYTES: Final = 5
#: Bits of float64 that float40 lacks: of the mantissa, and the difference of the exponents' biases.
_DROPPED: Final = np.uint64(52 - 31)
_REBIAS: Final = np.uint64((1023 - 127) << 31)
_SIGN: Final = np.uint64(1 << 63)
_SMALLEST, _LARGEST = 2.0**-126, 2.0**128


class PackedArray(Struct, frozen=True):
    """A packed array. Files may have nested lists by rows in its place."""

    shape: Annotated[tuple[Count, ...], Meta(min_length=1, max_length=2)]
    data: Annotated[
        str,
        described(
            "base64 of little-endian numbers, by rows: float64, or if bytes is 5 float40, which is float32 (1 bit of "
            "sign, 8 of exponent) with 31 bits of mantissa.",
            contentEncoding="base64",
            pattern="^[A-Za-z0-9+/]*={0,2}$",
        ),
    ]
    bytes: Annotated[Literal[5, 8], described("Bytes of a number.")] = 8


def bytes_per_number(name: str) -> int:
    """Return how many bytes a number of an array takes in a version."""
    return SHORT_BYTES if name in SHORT else 8


def nearest(array: Floats) -> Floats:
    """Return the nearest numbers that float40 has.

    >>> nearest(np.array([0.1, -3.0, 1e-99])) - [0.1, -3.0, 0.0]
    array([5.82076054e-12, 0.00000000e+00, 0.00000000e+00])
    """
    bits = np.ascontiguousarray(array, dtype=np.float64).view(np.uint64)
    one = np.uint64(1)
    half = (one << (_DROPPED - one)) - one + ((bits >> _DROPPED) & one)
    result = (((bits + half) >> _DROPPED) << _DROPPED).view(np.float64)
    if not (np.abs(result) < _LARGEST).all():
        raise EstimationError("the precision has numbers too large for a version")
    return np.where(np.abs(result) < _SMALLEST, 0.0, result)


def rounded(model: ClickModel, *, intercept: bool) -> ClickModel:
    """Return a model as a version can have it: the same one if nothing is to be rounded.

    Raise `EstimationError` or `InputError` if rounding leaves no precision to work with.
    """
    arrays = model.pack()
    short = {name: nearest(array) for name, array in arrays.items() if name in SHORT}
    if all(np.array_equal(array, arrays[name]) for name, array in short.items()):
        return model
    return type(model).unpack({**arrays, **short}, intercept=intercept)


def _is_short(array: Floats) -> bool:
    try:
        return np.array_equal(nearest(array), array)
    except EstimationError:
        return False


def packed(name: str, array: Floats) -> dict[str, Any]:
    """Return an array as a record has it, without any loss: one of `SHORT` that is not rounded is float64."""
    data = array.astype("<f8").tobytes()
    document: dict[str, Any] = {"shape": list(array.shape)}
    if name in SHORT and _is_short(array):
        document["bytes"] = SHORT_BYTES
        bits = np.frombuffer(data, "<u8")
        short = ((bits & ~_SIGN) >> _DROPPED) - _REBIAS * (bits & ~_SIGN != 0) + ((bits & _SIGN) >> np.uint64(24))
        data = np.ascontiguousarray(short.astype("<u8").view(np.uint8).reshape(-1, 8)[:, :SHORT_BYTES]).tobytes()
    return document | {"data": b64encode(data).decode()}


def unpacked(document: Mapping[str, Any]) -> Floats:
    """Return the array of a record; raise `ValueError`, `TypeError` or `KeyError` if it is none."""
    data, shape, width = b64decode(document["data"], validate=True), document["shape"], document.get("bytes", 8)
    if width == 8:
        return np.frombuffer(data, "<f8").astype(np.float64).reshape(shape)
    if width != SHORT_BYTES:
        raise ValueError(f"numbers of {width} bytes")
    whole = np.zeros((len(data) // SHORT_BYTES, 8), dtype=np.uint8)
    whole[:, :SHORT_BYTES] = np.frombuffer(data, np.uint8).reshape(-1, SHORT_BYTES)
    bits = whole.view("<u8").astype(np.uint64).ravel()
    sign, size = bits >> np.uint64(39), bits & np.uint64((1 << 39) - 1)
    whole_bits = (sign << np.uint64(63)) | ((size + _REBIAS * (size != 0)) << _DROPPED)
    return np.asarray(whole_bits.view(np.float64).reshape(shape))
