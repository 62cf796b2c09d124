"""An embedded runner whose process is killed again and again, before or after a commit."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.embedded.traffic import ARMS, SECOND, Sent, deliver, finish
from worker.embedded.runner import Embedded
from worker.embedded.state import StateFolder
from worker.stream.settings import LearningSettings


class Crash(Exception):  # noqa: N818
    """The process is killed."""


class FragileState(StateFolder):
    """Raises `Crash` before or after the commit of a given number."""

    def __init__(self, path: Path, crash_at: int, after: bool) -> None:
        self._left, self._after = 10**9, after
        super().__init__(path)
        self._left = crash_at

    def commit(self) -> None:
        self._left -= 1
        if self._left == 0 and not self._after:
            raise Crash
        super().commit()
        if self._left == 0:
            raise Crash


def through_crashes(folder: Path, settings: LearningSettings, sent: list[Sent], seed: int) -> Embedded:
    """Deliver records to runners that crash, until one comes to the end; return that one."""
    generator = np.random.default_rng(seed)
    crashes = 0
    while True:
        # Records without an answer are sent again: here all of the last seconds.
        crash_at = int(generator.integers(1, 30)) if crashes < 12 else 10**9
        state = FragileState(folder, crash_at, bool(generator.integers(2)))
        try:
            runner = Embedded(settings, ARMS, partitions=1 + seed % 3, state=state)
            since = runner.time - 2 * SECOND
            deliver(runner, [one for one in sent if one.at >= since])
            finish(runner)
            break
        except Crash:
            crashes += 1
        finally:
            state.close()
    assert crashes >= 5
    return runner
