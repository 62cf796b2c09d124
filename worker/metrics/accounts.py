"""The accounts of a `Tally`: three identities that hold at every moment (docs/design.md §7)."""

from __future__ import annotations

from worker.stream.topology import Tally


def open_sessions(tally: Tally) -> int:
    """Return how many sessions the table holds by the accounts."""
    return tally.opened + tally.recovered - tally.ended.total() - tally.handed_over


def parked_records(tally: Tally) -> int:
    """Return how many feedback records wait for their arrival by the accounts."""
    settled = tally.applied + tally.redundant + tally.late + tally.outside + tally.unparked + tally.dead_feedback
    return tally.feedback + tally.recovered_parked - settled - tally.handed_over_parked


def imbalances(tally: Tally, sessions: int, parked: int) -> dict[str, int]:
    """Return the left minus the right side of each identity, given the sessions and parked records in the tables."""
    return {
        "arrivals": tally.arrivals - tally.opened - tally.repeated - tally.unremembered - tally.dead_arrivals,
        "sessions": open_sessions(tally) - sessions,
        "feedback": parked_records(tally) - parked,
    }
