"""Sessions and their displays that count, as arrays: what a fold learns from, and what waits for the first fold.

Centre and scale of contexts need `LEAST_SESSIONS` sessions (`standardising.py`). Until so many have come, the version
itself carries the sessions of the windows so far. So nothing is lost, and a learner that restarts has them as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from worker.bandit.arrays import Floats, Ints
from worker.bandit.click_model import Observations
from worker.errors import InputError
from worker.stream.contexts import stack_packed
from worker.stream.windows import ClosedWindow

#: Names of the arrays in the record of a version.
ARRAYS: Final = ("contexts", "rows", "arms", "positions", "clicked")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ObservedSessions:
    """Sessions in the order of their keys, window by window, and their displays that count.

    Parameters
    ----------
    contexts : (n, d), as they came, one row per session; NaN where a number is missing
    rows, arms, positions : (m,), per display its session, the index of its arm, and its position from 1 on
    clicked : (m,), 1.0 or 0.0
    """

    contexts: Floats
    rows: Ints
    arms: Ints
    positions: Ints
    clicked: Floats

    def __len__(self) -> int:
        return len(self.contexts)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ObservedSessions):
            return NotImplemented
        mine, theirs = self.pack(), other.pack()
        return all(np.array_equal(mine[name], theirs[name], equal_nan=True) for name in ARRAYS)

    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def of(cls, window: ClosedWindow, *, dim: int, indices: Mapping[str, int]) -> ObservedSessions:
        """Return the sessions of a window; displays of arms that have no index are left out."""
        arms = window.indices(window.codes, indices)
        known = arms >= 0
        return cls(
            contexts=stack_packed([plan.context for plan in window.plans], dim),
            rows=window.rows[known],
            arms=arms[known],
            positions=window.positions[known],
            clicked=window.clicked[known].astype(np.float64),
        )

    def followed_by(self, later: ObservedSessions) -> ObservedSessions:
        """Return these sessions and later ones."""
        return ObservedSessions(
            contexts=np.concatenate([self.contexts, later.contexts]),
            rows=np.concatenate([self.rows, later.rows + len(self)]),
            arms=np.concatenate([self.arms, later.arms]),
            positions=np.concatenate([self.positions, later.positions]),
            clicked=np.concatenate([self.clicked, later.clicked]),
        )

    def observations(self, prepare: Callable[[Floats], Floats]) -> Observations:
        """Return the displays, without the sessions that have none; `prepare` is applied to the contexts."""
        rows, sessions = np.unique(self.rows, return_inverse=True)
        return Observations(
            contexts=prepare(self.contexts[rows]),
            sessions=sessions.astype(np.intp),
            arms=self.arms,
            clicked=self.clicked,
        )

    def renamed(self, indices: Sequence[int]) -> ObservedSessions:
        """Return the same under other indices of arms, one per old index; displays of arms with −1 are left out."""
        arms = np.array(indices, dtype=np.intp)[self.arms]
        kept = arms >= 0
        return replace(
            self,
            rows=self.rows[kept],
            arms=arms[kept],
            positions=self.positions[kept],
            clicked=self.clicked[kept],
        )

    # ── in the record of a version ───────────────────────────────────────────────────────────────────────────────────

    def pack(self) -> dict[str, Floats]:
        """Return the arrays by name."""
        return {name: np.asarray(getattr(self, name), dtype=np.float64) for name in ARRAYS}

    @classmethod
    def unpack(cls, arrays: Mapping[str, Floats], *, dim: int, arms: int) -> ObservedSessions:
        """Return what `pack` took apart; raise `InputError` if it is damaged."""
        contexts, rows, shown, positions, clicked = (arrays[name] for name in ARRAYS)
        if contexts.ndim != 2 or contexts.shape[1] != dim or np.isinf(contexts).any():
            raise InputError(f"pending: contexts must be rows of {dim} numbers")
        if any(one.shape != (len(rows),) for one in (rows, shown, positions, clicked)):
            raise InputError("pending: rows, arms, positions and clicked must be lists of the same length")
        for name, numbers, least, most in (
            ("rows", rows, 0, len(contexts) - 1),
            ("arms", shown, 0, arms - 1),
            ("positions", positions, 1, 2**53),
            ("clicked", clicked, 0, 1),
        ):
            if not ((numbers >= least) & (numbers <= most) & (numbers == np.floor(numbers))).all():
                raise InputError(f"pending: {name} must be whole numbers from {least} to {most}")
        return cls(
            contexts=contexts,
            rows=rows.astype(np.intp),
            arms=shown.astype(np.intp),
            positions=positions.astype(np.intp),
            clicked=clicked,
        )
