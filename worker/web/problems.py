"""The list of problems at the top of the status page: what is wrong, in whole sentences."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from worker.metrics import Snapshot
from worker.web.figures import lately

MOST_LAG: Final = 10_000  # records of one topic
MOST_DEAD: Final = 0.01  # share of the records read
STALE_WINDOWS: Final = 10  # windows without a new version


def problems(snapshot: Snapshot, unready: str | None, time: int) -> list[dict[str, str]]:
    """Return the problems at a time (milliseconds), the worst first."""
    return [
        *({"level": "bad", "text": text} for text in _failures(snapshot, unready)),
        *({"level": "warn", "text": text} for text in _warnings(snapshot, time)),
    ]


def _failures(snapshot: Snapshot, unready: str | None) -> Iterator[str]:
    if unready is not None:
        yield f"Not ready: {unready}."
    broken = [f"{name} {value:+.0f}" for name, value in snapshot.imbalance.items() if value]
    if broken:
        yield f"The accounts do not balance ({', '.join(broken)}). This is a defect of the worker."
    if refused := int(snapshot.numbers["refused_versions_total"]):
        yield f"Parameter versions refused: {refused}. They are unreadable, or two learners disagree."
    if snapshot.windows and snapshot.windows[-1].episode.rejected is not None:
        yield "The last window gave no usable estimate. The previous version still serves."


def _warnings(snapshot: Snapshot, time: int) -> Iterator[str]:
    behind = [f"{records:,.0f} records of {topic}" for topic, records in snapshot.lag.items() if records > MOST_LAG]
    if behind:
        yield f"Consumer lag: {', '.join(behind)} not read yet."
    recent = lately(snapshot)
    if recent["read"] and recent["dead"] > MOST_DEAD * recent["read"]:
        yield f"{recent['dead'] / recent['read']:.1%} of the recent records went to the dead letters."
    parameters = snapshot.parameters
    if parameters is None:
        yield "No parameters have been received yet."
    elif parameters.frozen:
        yield "Learning is frozen by command."
    elif parameters.made_at and time - parameters.made_at > STALE_WINDOWS * parameters.settings.window:
        minutes = (time - parameters.made_at) / 60_000
        yield f"The parameters are {minutes:,.0f} minutes old. No newer version has been published."
