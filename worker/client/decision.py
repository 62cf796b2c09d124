"""A decision as a client sees it: the ad to show now, and those to show next if it is passed over."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal, TypeAlias

from worker.errors import InputError
from worker.stream.events import Decision as DecisionRecord
from worker.stream.events import Mode

#: Where a decision comes from: a record of the workers, the slate of an earlier record, or the fallback ads of the
#: caller, because no record came in time.
Origin: TypeAlias = Literal["worker", "slate", "timeout"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdDecision:
    """The ads of a session from a position on.

    `slate` has the ad of `position` first. `mode`, `propensity` and `value` are known for the position of a record
    only.

    >>> shown = AdDecision(session_id="s", arrived_at=0, position=1, slate=("shoes", "hats"), origin="worker")
    >>> shown.arm, shown.at(2).arm, shown.at(3).ended
    ('shoes', 'hats', True)
    """

    session_id: str
    arrived_at: int
    position: int
    slate: tuple[str, ...]
    origin: Origin
    mode: Mode | None = None
    propensity: float | None = None
    value: float | None = None
    parameters_version: int | None = None
    tokens: tuple[str, ...] | None = None

    @property
    def arm(self) -> str | None:
        """The ad to show now; None if there is none."""
        return self.slate[0] if self.slate else None

    @property
    def token(self) -> str | None:
        """The token of the display, for its feedback; None if the workers have no secret."""
        return self.tokens[0] if self.tokens else None

    @property
    def timed_out(self) -> bool:
        """Whether these are fallback ads, because the workers did not answer in time."""
        return self.origin == "timeout"

    @property
    def ended(self) -> bool:
        """Whether the session has no more ads."""
        return not self.slate and not self.timed_out

    def at(self, position: int) -> AdDecision:
        """Return the decision of a later position of the slate, if all before it are passed over.

        The position after the slate is that of a session that has ended.
        """
        passed = position - self.position
        if not 0 <= passed <= len(self.slate):
            last = self.position + len(self.slate)
            raise InputError(f"position {position} is not in the slate of positions {self.position} to {last}")
        if not passed:
            return self
        return replace(
            self,
            position=position,
            slate=self.slate[passed:],
            tokens=None if self.tokens is None else self.tokens[passed:],
            origin="timeout" if self.timed_out else "slate",
            mode=None,
            propensity=None,
            value=None,
        )


def from_record(record: DecisionRecord) -> AdDecision:
    """Return the decision of a record of the topic `decisions`."""
    shared = {f.name: getattr(record, f.name) for f in fields(AdDecision) if f.name != "origin"}
    return AdDecision(origin="worker", **shared)
