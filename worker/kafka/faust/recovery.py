"""The end of a recovery as a condition, not as an event that can be missed."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Literal

from faust.tables.recovery import Recovery


class RecoveryEnd(asyncio.Event):
    """Replaces the event with which Faust signals the end of a recovery.

    Faust sets that event and clears it again at once. If the last changelog record is applied before anything waits for
    the event, which is likely in bulk, the signal is lost and the worker stays in its rebalance for ever. Setting the
    event once more from outside is worse: it stays set, and the next recovery ends before it has read anything.
    """

    def __init__(self, recovery: Recovery) -> None:
        super().__init__()
        self._recovery = recovery

    async def wait(self) -> Literal[True]:
        """Return when nothing is left to read; the event only shortens the time until the next check."""
        while self._recovery.in_recovery or self._recovery.need_recovery():
            self.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(0.5):
                    await super().wait()
        return True
