"""The list of problems at the top of the status page: what is wrong, with details and what to do, in sentences."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from worker.metrics import Snapshot

MOST_LAG: Final = 10_000  # records of one topic


def problems(snapshot: Snapshot, unready: str | None) -> list[dict[str, str]]:
    """Return the problems, the worst first; troubles also have `kind`, `detail` and `do`."""
    found = [
        *({"level": "bad", "text": text} for text in _failures(snapshot, unready)),
        *(
            {
                "level": one.kind.level,
                "kind": one.name,
                "text": one.kind.meaning,
                "detail": one.detail,
                "do": one.kind.remedy,
            }
            for one in snapshot.troubles
        ),
        *({"level": "warn", "text": text} for text in _warnings(snapshot)),
    ]
    return sorted(found, key=lambda problem: problem["level"] != "bad")


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


def _warnings(snapshot: Snapshot) -> Iterator[str]:
    behind = [f"{records:,.0f} records of {topic}" for topic, records in snapshot.lag.items() if records > MOST_LAG]
    if behind:
        yield f"Consumer lag: {', '.join(behind)} not read yet."
    parameters = snapshot.parameters
    if parameters is None:
        yield "No parameters have been received yet."
    elif parameters.frozen:
        yield "Learning is frozen by command."
