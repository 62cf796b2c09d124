"""The end of a recovery is noticed whenever it comes, and never before."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from worker.kafka.faust.recovery import RecoveryEnd


@dataclass
class Recovery:
    in_recovery: bool
    remaining: int = 0

    def need_recovery(self) -> bool:
        return self.remaining > 0


def end_of(recovery: Any) -> RecoveryEnd:
    return RecoveryEnd(recovery)


def test_an_end_that_came_before_anybody_waited_is_not_missed() -> None:
    async def scene() -> None:
        end = end_of(Recovery(in_recovery=False))
        await asyncio.wait_for(end.wait(), 0.1)

    asyncio.run(scene())


def test_an_old_signal_does_not_end_a_recovery_that_has_just_begun() -> None:
    async def scene() -> None:
        recovery = Recovery(in_recovery=True, remaining=5)
        end = end_of(recovery)
        end.set()
        waiting = asyncio.create_task(end.wait())
        for _ in range(5):
            await asyncio.sleep(0)
        assert not waiting.done()
        recovery.in_recovery, recovery.remaining = False, 0
        end.set()
        end.clear()  # as Faust does, at once
        await asyncio.wait_for(waiting, 2)

    asyncio.run(scene())
