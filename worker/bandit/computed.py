"""What a value has computed of itself, as named arrays, so that another process need not compute it again.

To factorise a version takes a second, to serve by it microseconds. A class names, in `computed`, those of its cached
properties that serving needs and that take long. Whatever does not come along is computed when it is needed, to the
same bits.
"""

from __future__ import annotations

from collections.abc import Mapping

from worker.bandit.arrays import Array


def computed_by(value: object, prefix: str = "") -> dict[str, Array]:
    """Return the named cached properties of a value that are computed; none if its class names none.

    >>> from functools import cached_property
    >>> class Square:
    ...     computed = ("side", "area")
    ...     side = cached_property(lambda self: 3)
    ...     area = cached_property(lambda self: self.side**2)
    >>> square = Square()
    >>> square.side, computed_by(square, "square.")
    (3, {'square.side': 3})
    """
    names: tuple[str, ...] = getattr(value, "computed", ())
    return {f"{prefix}{name}": vars(value)[name] for name in names if name in vars(value)}


def resume(value: object, arrays: Mapping[str, Array], prefix: str = "") -> None:
    """Give a value what an equal one has computed; what `arrays` lacks is left to be computed."""
    names: tuple[str, ...] = getattr(value, "computed", ())
    for name in names:
        if (array := arrays.get(f"{prefix}{name}")) is not None:
            vars(value)[name] = array
