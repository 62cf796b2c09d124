"""Plan recorded sessions again, and compare the records of them.

Rules that hold in this file:

- A session is planned under every version that its records name: from its arrival, or, if the log lacks that, from
  `opened` in the journal. Imported sessions were planned by another system.
- The journal does not name users. Without its arrival, a session may be in the control group or not: both are planned.
- A decision in mode `fallback` may have been made because the table of sessions was full, for any plan.
- All fields are compared, numbers to a relative 1e-9, because exponentials differ in the last bit between kinds of
  machines. Tokens are not compared: the secret is not in the log.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isclose
from typing import Any, Final, NamedTuple, TypeAlias

from worker.logs.traces import SessionTrace, TraceReader
from worker.logs.versions import RecordedVersions
from worker.stream.contexts import pack_context
from worker.stream.events import Arrival, Decision, Opened
from worker.stream.slates import Slate

CLOSE: Final = 1e-9

Difference: TypeAlias = tuple[str, Any, Any]  # field, expected, found


class Plan(NamedTuple):
    """A slate that an arrival may have been given."""

    arrival: Arrival
    slate: Slate


#: The possible plans by trace and version.
Plans: TypeAlias = dict[tuple[SessionTrace, int], list[Plan]]


def planned_again(versions: RecordedVersions, reader: TraceReader, traces: Sequence[SessionTrace]) -> Plans:
    """Plan sessions under every version of the log that their records name."""
    groups: dict[int, list[tuple[SessionTrace, Arrival]]] = {}
    for trace in traces:
        named = {decision.parameters_version for _, decision in trace.decisions if decision.mode != "imported"}
        named.update(opened.parameters_version for _, opened in trace.openings)
        for version in named & versions.known.keys():
            groups.setdefault(version, []).extend((trace, one) for one in reader.arrivals(trace, version))
    plans: Plans = {}
    for version, group in groups.items():
        arrivals = [arrival for _, arrival in group]
        contexts = [pack_context(arrival.context) for arrival in arrivals]
        planner = versions.planner(version)
        nameless = planner.parameters.settings.control_share and any(not trace.arrivals for trace, _ in group)
        for share in (None, 0.0, 1.0) if nameless else (None,):
            slates = planner.plan(arrivals, contexts, control_share=share)
            for (trace, arrival), slate in zip(group, slates, strict=True):
                if share is None or not trace.arrivals:
                    plans.setdefault((trace, version), []).append(Plan(arrival, slate))
        for trace, arrival in group:
            if any(decision.mode == "fallback" for _, decision in trace.decisions):
                plans[trace, version].append(Plan(arrival, planner.fallback(arrival)))
    return plans


def difference(record: Decision | Opened, plan: Plan) -> Difference | None:
    """Return the first field in which a record differs from a plan, with the planned value and its own.

    A decision at position p shows the tail of the slate from p on.
    """
    arrival, slate = plan
    expected: dict[str, Any]
    if isinstance(record, Opened):
        expected = {
            "context": arrival.context,
            "exclude": arrival.exclude,
            "slate": slate.arms,
            "modes": slate.modes,
        }
    elif not slate.arms:
        expected = {"position": 1, "arm": None, "slate": (), "mode": "none", "propensity": 1.0, "value": 0.0}
    elif (at := record.position - 1) >= len(slate.arms):
        return "position", f"at most {len(slate.arms)}", record.position
    else:
        expected = {
            "arm": slate.arms[at],
            "slate": slate.arms[at:],
            "mode": slate.modes[at],
            "propensity": 1.0 if slate.propensities is None else slate.propensities[at],
            "value": slate.values[at],
        }
    for name, wanted in expected.items():
        found = getattr(record, name)
        is_close = isinstance(found, float) and isclose(found, wanted, rel_tol=CLOSE, abs_tol=1e-12)
        if found != wanted and not is_close:
            return name, wanted, found
    return None
