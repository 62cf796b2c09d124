"""The sessions of a log as a table of the Open Bandit Pipeline, a row per display.

Rules that hold in this file:

- Columns are those of the Open Bandit Dataset, its index first: `item_id` is the number of the arm in the newest
  version, `user_feature_<i>` the columns of the context. `session_id`, `arm` and `reward` are for `adcascade import`.
- `propensity_score` is that of the decision of the position, given the earlier positions and the mode. Without such a
  decision it follows from that of position 1, if the whole slate was determined or drawn uniformly.
- A session is left out and counted if the log lacks its slate or a propensity, or ends before the session.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Final

from worker.errors import InputError
from worker.logs.ordered import OrderedLog
from worker.logs.traces import SessionTrace, TraceReader
from worker.stream.events import Decision

COLUMNS: Final = ("", "timestamp", "item_id", "position", "click", "propensity_score", "session_id", "arm", "reward")

#: Why a session is left out.
NO_ARRIVAL: Final = "arrival, first decision or version not in the log"


class ObpTable:
    """The rows of a log; `left_out` counts the sessions without rows by reason, after `rows` has been read."""

    def __init__(self, log: OrderedLog) -> None:
        newest = log.versions.newest
        if newest is None:
            raise InputError("the log has no parameters, which say what the arms are: record all topics")
        self._log, self._newest = log, newest.version
        arms = log.versions.read(newest.version).arms
        self._items = {arm.arm: (index, arm.reward) for index, arm in enumerate(arms)}
        self.header = [*COLUMNS, *(f"user_feature_{column}" for column in range(newest.settings.dim))]
        self.sessions = self.displays = 0
        self.left_out: Counter[str] = Counter()

    def rows(self) -> Iterator[list[Any]]:
        """Yield the rows, in the order of arrival."""
        reader = TraceReader(self._log)
        for trace in reader.read(self._log.entries("writing")):
            arrivals = reader.arrivals(trace, self._newest)
            found = self._displays(trace, reader.latest) if arrivals else NO_ARRIVAL
            if isinstance(found, str):
                self.left_out[found] += 1
                continue
            self.sessions += 1
            moment = datetime.fromtimestamp(trace.arrived_at / 1000, UTC).isoformat(" ", "milliseconds")
            context = ["" if number != number else number for number in arrivals[0].context]
            for position, (arm, clicked, propensity) in enumerate(found, start=1):
                item, reward = self._items[arm]
                display = (moment, item, position, int(clicked), propensity)
                yield [self.displays, *display, trace.session_id, arm, reward, *context]
                self.displays += 1

    def _displays(self, trace: SessionTrace, latest: int) -> list[tuple[str, bool, float]] | str:
        """Return arm, click and propensity of each display, or the reason why the session is left out."""
        decisions = {decision.position: decision for _, decision in trace.decisions}
        first, versions = decisions.get(1), self._log.versions.known
        if first is None or first.parameters_version not in versions or first.arm is None:
            return NO_ARRIVAL
        settings = versions[first.parameters_version].settings
        if trace.arrived_at + settings.session_timeout > latest and first.mode != "imported":
            return "not over at the end of the log"
        shown, clicked = trace.answered(first.slate, settings)
        displayed = shown if clicked else min(shown + 1, len(first.slate))
        found = []
        for position, arm in enumerate(first.slate[:displayed], start=1):
            propensity = _propensity(decisions.get(position), first, position, repeats=settings.repeats)
            if propensity is None:
                return "propensity not known"
            found.append((arm, clicked and position == displayed, propensity))
        return found


def _propensity(decision: Decision | None, first: Decision, position: int, *, repeats: bool) -> float | None:
    if decision is not None:
        return decision.propensity
    if first.propensity is None or first.mode == "imported":
        return None
    if first.mode in ("warmup", "random"):
        return 1 / (round(1 / first.propensity) - (0 if repeats else position - 1))
    return 1.0 if first.propensity == 1 else None
