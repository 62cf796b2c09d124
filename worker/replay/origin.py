"""The origin of learning again: settings, arms and version to start from, and the recorded orders."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from worker.errors import InputError
from worker.logs.ordered import OrderedLog
from worker.stream.decoding import Rejected, decode_journal
from worker.stream.events import Order, Progress
from worker.stream.parameters import Parameters
from worker.stream.settings import Arm, LearningSettings
from worker.stream.versions import KEPT


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The start of learning.

    loaded : versions to continue from, the newest last; empty to start from version 0
    made_at : offset in the recorded journal at which the newest of these was made; it contains the orders up to there
    compared : whether learning must reproduce the recorded versions
    """

    settings: LearningSettings
    arms: tuple[Arm, ...]
    loaded: Sequence[Parameters] = ()
    made_at: int = -1
    compared: bool = False


@dataclass(frozen=True, slots=True)
class Timetable:
    """The orders of the recorded journal (watermark, offset, order), and its last watermark, if it has progress.

    `opened` is the number of sessions by the start of their window, where not all were journaled.
    """

    orders: Sequence[tuple[int, int, Order]]
    end: int | None
    opened: Mapping[int, int] = field(default_factory=dict)


def read_timetable(log: OrderedLog) -> Timetable:
    """Read orders and progress from the recorded journal."""
    progress: dict[int, int] = {}
    counts: dict[tuple[int, int], int] = {}  # by start of the window and partition
    orders: list[tuple[int, int, Order]] = []
    for offset, value, timestamp in log.journal_records():
        try:
            event = decode_journal(value, timestamp)
        except Rejected:
            continue
        if isinstance(event, Progress):
            for partition in range(len(progress), event.partitions):
                progress[partition] = 0
            progress[event.partition] = max(progress[event.partition], event.time)
            for start, sessions in event.opened or ():
                key = start, event.partition
                counts[key] = max(counts.get(key, 0), sessions)
        elif isinstance(event, Order):
            orders.append((min(progress.values(), default=0), offset, event))
    end = min(progress.values(), default=0) or max(progress.values(), default=0)
    opened: Counter[int] = Counter()
    for (start, _), sessions in counts.items():
        opened[start] += sessions
    return Timetable(orders, end or None, opened)


def find_origin(log: OrderedLog, *, changes: dict[str, object], arms: Sequence[Arm] | None) -> Origin:
    """Return the start of learning: the oldest version of the log with `changes` to its settings.

    Learning starts from version 0 if the log has it, or if arms are given. Otherwise it continues from the oldest
    version after which all windows are complete in the log.
    """
    oldest = log.versions.oldest
    if oldest is None:
        if "dim" not in changes or arms is None:
            missing = [name for name, lacks in (("--dim", "dim" not in changes), ("--catalog", arms is None)) if lacks]
            raise InputError(
                f"the log has no parameters: give {' and '.join(missing)} "
                "(and --horizon and other settings that differ from the defaults)"
            )
        return Origin(settings=_settings(None, changes), arms=tuple(arms))
    settings = _settings(oldest.settings, changes)
    same = settings == oldest.settings
    if oldest.version == 0 or arms is not None:
        first = log.versions.read(oldest.version)
        given = first.arms if arms is None else tuple(arms)
        compared = same and oldest.version == 0 and given == first.arms
        return Origin(settings=settings, arms=given, compared=compared)
    base = _first_complete(log)
    loaded = log.versions.read(base)
    if settings.dim != loaded.settings.dim:
        raise InputError(f"--dim {settings.dim}: version {base} of the log has dim {loaded.settings.dim}")
    # The new journal begins at offset 0 and has the progress of one partition.
    reached = {0: min(loaded.progress.values())} if loaded.progress else {}
    history = [replace(loaded, journal_offset=-1, resume_offset=0, progress=reached)]
    while len(history) < KEPT and (before := history[0].version - 1) in log.versions.known:
        history.insert(0, log.versions.read(before))
    return Origin(settings=settings, arms=loaded.arms, loaded=history, made_at=loaded.journal_offset, compared=same)


def _settings(base: LearningSettings | None, changes: dict[str, object]) -> LearningSettings:
    return LearningSettings(**changes) if base is None else replace(base, **changes)  # type: ignore[arg-type]


def _first_complete(log: OrderedLog) -> int:
    first = log.first_time or 0
    for number in log.versions.published:
        if (log.versions.known[number].window_end or 0) >= first:
            return number
    return log.versions.published[-1]
