"""Records of one partition in progress: what arrivals and feedback leave in it, until the outputs are written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from worker.stream.events import Arrival, Feedback
from worker.stream.session import Session
from worker.stream.slates import Slate, SlatePlanner
from worker.stream.topology import Emits, Record

#: By session id: the planner, the packed context, and the slate.
Planned: TypeAlias = dict[str, tuple[SlatePlanner, bytes, Slate]]


@dataclass(slots=True)
class Batch:
    """Records with their events, None in place of dead letters, and what became of them so far.

    `planned` are the new sessions; `touched` maps every session concerned to whether its value has changed; `facts` are
    for the journal; `unremembered` are sessions without room; `decisions` are what clients are answered.
    """

    records: Sequence[Record]
    events: Sequence[Arrival | Feedback | None]
    emits: Emits
    planned: Planned = field(default_factory=dict)
    touched: dict[str, bool] = field(default_factory=dict)
    facts: list[dict[str, Any]] = field(default_factory=list)
    unremembered: dict[str, Session] = field(default_factory=dict)
    decisions: list[dict[str, Any]] = field(default_factory=list)
