"""When a recovery has ended: the condition itself, not the moment at which somebody said so."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Literal

from faust.tables.recovery import Recovery


class RecoveryEnd(asyncio.Event):
    """Takes the place of the event with which Faust signals the end of a recovery.

    Faust sets that event and clears it again at once. If the last changelog record is applied before anybody waits, and
    in bulk it is soon applied, the signal is lost and the worker stays in its rebalance for good. To set the event once
    more from outside is worse: it stays set, and the next recovery ends before it has read anything.
    """

    def __init__(self, recovery: Recovery) -> None:
        super().__init__()
        self._recovery = recovery

    async def wait(self) -> Literal[True]:
        """Return when nothing is left to be read; the event only shortens the time until it is looked at again."""
        while self._recovery.in_recovery or self._recovery.need_recovery():
            self.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(0.5):
                    await super().wait()
        return True
