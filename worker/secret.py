"""A value that does not show itself."""

from __future__ import annotations

from typing import NoReturn


class Secret:
    """Hide a password or a key in text, logs, errors and pickles; text is kept as UTF-8.

    >>> Secret("correct horse battery staple")
    Secret(…)
    """

    __slots__ = ("_value",)

    def __init__(self, value: str | bytes) -> None:
        self._value = value.encode() if isinstance(value, str) else bytes(value)

    def reveal(self) -> bytes:
        """Return the value itself."""
        return self._value

    def __repr__(self) -> str:
        return "Secret(…)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a secret cannot be pickled")
