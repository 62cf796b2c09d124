"""Stages of long work, each with a progress bar if the caller has one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Final, TypeAlias, TypeVar

from worker.console import ProgressBar

_TICK: Final = 1000  # items between two updates of the bar

#: Opens a stage by its title and the number of items (None: unknown).
Stage: TypeAlias = Callable[[str, float | None], AbstractContextManager[ProgressBar]]

Item = TypeVar("Item")


def silent(title: str, total: float | None) -> AbstractContextManager[ProgressBar]:
    """Open a stage whose bar shows nothing."""
    return nullcontext(ProgressBar())


def ticking(items: Iterable[Item], bar: ProgressBar) -> Iterator[Item]:
    """Yield the items and advance the bar now and then."""
    count = 0
    for item in items:
        yield item
        count += 1
        if count == _TICK:
            bar.advance(_TICK)
            count = 0
    bar.advance(count)
