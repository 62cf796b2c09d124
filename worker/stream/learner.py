"""The learner: a deterministic fold over the journal that makes the versions.

Rules that hold in this file (docs/design.md §4 and §5):

- Versions depend on the journal and the settings alone. There is no clock: a version's times come from progress
  records. So learners that were restarted, paused or run side by side make the same versions.
- **A window is closed** when the watermark (`windows.py`) reaches its end + session_timeout + lateness. One
  progress record may close several, in order, each with its own version. A window without sessions leaves no trace. A
  record for a closed window is late: counted, never folded.
- A record whose time lies far after its own timestamp in the journal is refused, live or not (`MAX_FACT_LEAD`,
  `MAX_PROGRESS_LEAD`). So a session of the year 2100 holds back no `resume_offset`, and the clock of a worker that is
  an hour ahead closes no window, where the broker sets the timestamps of the journal.
- `arm`, `arms`, `command`, `features` and `import` take effect at their position and make a version at once, unless
  they change nothing.
- **Position** of a version in the journal: `window_end`, before which everything is closed; `journal_offset`, the
  record that made it; `resume_offset`, the oldest record that an open window needs, else journal_offset + 1;
  `progress`, the highest of each partition; the sums of all closed windows per ad (`accounts.py`), and those of the
  comparison with the control group (`lift.py`), by which every version decides whether it is guarded.
- **Restart**: read from resume_offset; up to journal_offset take only `opened`, `feedback` and the counts of sessions
  of open windows; then close every window that is due by the loaded progress (one may have been due when the version
  was made); then take everything.
- **Nothing in the journal stops the fold.** A record that raises is counted and passed over, a window without a usable
  estimate is rejected. Both leave the state as it was (a window is closed all the same), so that every learner goes on
  alike. Two errors are passed on: `FailedError` (a known version comes out differently) and `MemoryError`.
- **Republishing**: when `REPUBLISH` windows were closed since the position of the newest version and none of them made
  a version (idle, frozen, rejected), the same version is published again from the newer position.
- Offsets rise. A record at or before an offset that was handled is passed over, however often it comes. A record
  without a timestamp has the timestamp 0, by which nothing is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

from worker.errors import EstimationError, FailedError
from worker.kernels import fingerprint
from worker.stream.catalogue import Refusal, carry_out, under
from worker.stream.comparison import compared, popular
from worker.stream.decoding import Rejected, decode_journal
from worker.stream.episodes import episode_of
from worker.stream.events import (
    ArmChange,
    CatalogueChange,
    Episode,
    FeedbackFact,
    JournalEvent,
    Opened,
    Order,
    Progress,
    Tag,
)
from worker.stream.feature_changes import width_of_context
from worker.stream.folding import fold, one_thread, predicted_by, with_new_arms
from worker.stream.packing import rounded
from worker.stream.parameters import Parameters
from worker.stream.settings import Arm, LearningSettings, check_columns, continued
from worker.stream.troubles import Troubles
from worker.stream.version_sizes import check_size
from worker.stream.versions import KEPT, RoundedError, base_version, by_version, check_same, keep, should_publish
from worker.stream.windows import OpenWindows, Watermark

#: Offset and value of a journal record and, where it is known, its timestamp.
JournalRecord: TypeAlias = tuple[int, bytes | None] | tuple[int, bytes | None, int]

#: Windows without a version after which the newest one is published again.
REPUBLISH: Final = 10


@dataclass(slots=True, kw_only=True)
class Outcome:
    """The result of some journal records.

    Write the episodes before the versions: after a crash in between, both are made again; in the other order an episode
    would be lost. So an episode may come twice. A version may too: `should_publish` decides whether to write it. Apply
    a tag before the versions that were made after it, for the same reason.
    """

    versions: list[Parameters] = field(default_factory=list)
    episodes: list[Episode] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    tags: list[tuple[int, Tag]] = field(default_factory=list)  # with their offsets
    late: int = 0  # records for closed windows
    troubles: Troubles = field(default_factory=Troubles)


class Learner:
    """Fold the journal into versions.

    Parameters
    ----------
    settings : settings of new versions
    arms : the arms of version 0; later versions have theirs from the journal
    history : published versions, at least the newest 8, in any order, possibly repeated
    made_under : settings by version, where known versions are made again (`replay --verify`)
    with_episodes : whether to assess closed windows, which is about half of the work
    first : version 0, where it is not the prior (`starting.py`)

    Examples
    --------
    >>> learner = Learner(LearningSettings(dim=1), [Arm(arm="a", reward=1.0)])
    >>> [version.version for version in learner.begin().versions]
    [0]
    >>> learner.handle([(0, b'{"kind":"arm","arm":"b","reward":2,"active":true}')]).versions[0].arms[1].arm
    'b'
    """

    def __init__(
        self,
        settings: LearningSettings,
        arms: Sequence[Arm],
        history: Iterable[Parameters] = (),
        *,
        made_under: Mapping[int, LearningSettings] | None = None,
        with_episodes: bool = True,
        first: Parameters | None = None,
    ) -> None:
        self._configured = settings
        self._made_under = {} if made_under is None else made_under
        self._with_episodes = with_episodes
        self._known = by_version(history)
        self._newest_known = self._known[max(self._known)] if self._known else None
        if self._newest_known is None:
            check_columns(settings, len(arms))
            first = first or Parameters.first(settings, tuple(arms))
            check_size(first)
            self._start(first)
        else:
            self._start(self._known[base_version(self._known)])

    def _start(self, loaded: Parameters) -> None:
        self._configured = continued(self._configured, loaded.settings)
        self._current, self._accounts, self._lift = loaded, loaded.accounts, loaded.lift
        self._kept = {n: p for n, p in self._known.items() if loaded.version - KEPT < n < loaded.version}
        self._kept[loaded.version] = loaded
        #: How far the partitions have come, and what waits for windows to be closed.
        self.watermark = Watermark(loaded.progress)
        self.windows = OpenWindows(window=self.settings.window, closed_until=loaded.window_end or 0)
        self._next_offset = loaded.resume_offset
        self._live_from = loaded.journal_offset + 1
        self._live = False

    # ── looking at it ────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def current(self) -> Parameters:
        """The newest version made or loaded."""
        return self._current

    @property
    def settings(self) -> LearningSettings:
        """What the next version is made under."""
        following = self._current.version + 1
        known = self._known.get(following)
        return known.settings if known else self._made_under.get(following, self._configured)

    @property
    def resume_offset(self) -> int:
        """Where to read the journal from."""
        return self._current.resume_offset

    # ── reading the journal ──────────────────────────────────────────────────────────────────────────────────────────

    def check_start(self, first: int, end: int | None = None) -> None:
        """Raise `FailedError` if the journal, which has the offsets `first` up to `end`, lacks what is needed."""
        if first > self.resume_offset and self._newest_known is not None:
            self._start(self._newest_known)  # what is missing in the history cannot be made again
        if first > self.resume_offset:
            raise FailedError(
                f"the journal begins at offset {first}, but version {self._current.version} needs it from "
                f"{self.resume_offset}: it was trimmed too early, and what it held is lost. Keep the journal longer; "
                "to go on, restore it or begin with a new journal and new parameters"
            )
        if end is not None and end < self._live_from:
            raise FailedError(
                f"the journal ends at offset {end}, but version {self._current.version} was made at "
                f"{self._live_from - 1}: this is not the journal that the parameters were made from"
            )

    def begin(self) -> Outcome:
        """Return what is to be published before anything is read: version 0, if no version is known."""
        return Outcome(versions=[self._current] if self._newest_known is None else [])

    def handle(self, records: Iterable[JournalRecord]) -> Outcome:
        """Take journal records in their order; those handled before are passed over.

        A record that cannot be read, or that raises, is counted and passed over. Raises only `FailedError`, if a
        version that is known comes out with another content, and `MemoryError`.
        """
        outcome = Outcome()
        for offset, value, *timestamp in records:
            if offset < self._next_offset:
                continue
            if not self._live and offset >= self._live_from:
                self._go_live(outcome)
            self._next_offset = offset + 1
            try:
                self._take(offset, decode_journal(value, *timestamp), outcome)
            except (FailedError, MemoryError):
                raise
            except Rejected as rejected:
                if self._live:
                    kind = "far-future" if rejected.reason == "future" else "fold-passed-over"
                    outcome.troubles.add(kind, f"journal offset {offset}: {rejected.reason}")
            except Exception as error:
                _pass_over(offset, error, outcome)
        if not self._live and self._next_offset >= self._live_from:
            self._go_live(outcome)
        return outcome

    def _take(self, offset: int, event: JournalEvent, outcome: Outcome) -> None:
        if isinstance(event, FeedbackFact):
            outcome.late += not self.windows.answer(offset, event) and self._live
        elif isinstance(event, Opened):
            dim = width_of_context(self._current, event.parameters_version)
            if len(event.context) != dim:
                raise Rejected("dimension", f"the context has {len(event.context)} numbers, not {dim}")
            outcome.late += not self.windows.open(offset, event) and self._live
        elif self._live:
            self._carry_out(offset, event, outcome)

    def _go_live(self, outcome: Outcome) -> None:
        self._live = True
        self._close_due(self._live_from - 1, outcome)

    def _carry_out(self, offset: int, event: Progress | Order, outcome: Outcome) -> None:
        if isinstance(event, Progress):
            self.watermark.advance(event, span=self.settings.window + self.settings.grace)
            self._close_due(offset, outcome)
            self._republish_if_due(offset, outcome)
            return
        if isinstance(event, Tag):
            outcome.tags.append((offset, event))  # no part of any version
            return
        current = replace(under(self.settings, self._current), progress=self.watermark.by_partition())
        with one_thread():
            changed = carry_out(current, event, self._kept)
        if isinstance(changed, Refusal):
            outcome.refusals.append(replace(changed, offset=offset))
            outcome.troubles.add("order-refused", changed.reason)
        elif changed is not None:
            if len(changed.arms) > len(current.arms) and isinstance(event, ArmChange | CatalogueChange):
                # All sessions of this time are in the journal: which of the later ones are already is left to chance.
                changed = with_new_arms(changed, self.windows.plans(self.watermark.time - self.settings.lateness))
            reached = self.watermark.reached
            soon = max(current.effective_at, reached + 2 * self.settings.lateness if reached else 0)
            if changed.former != current.former:
                changed = replace(changed, former_until=soon + self.settings.window + self.settings.grace)
            self._make(changed, offset, soon, outcome)

    # ── closing windows ──────────────────────────────────────────────────────────────────────────────────────────────

    def _close_due(self, offset: int, outcome: Outcome) -> None:
        """Close every window that the watermark calls for, the earliest first."""
        while due := self.windows.due(self._due_until):
            try:
                self._close(due[0], offset, outcome)
            except (FailedError, MemoryError):
                raise
            except Exception as error:
                _pass_over(offset, error, outcome)
        self.windows.skip(self._due_until)

    @property
    def _due_until(self) -> int:
        settings = self.settings
        return (self.watermark.time - settings.grace) // settings.window * settings.window

    def _close(self, end: int, offset: int, outcome: Outcome) -> None:
        settings, parent = self.settings, self._current
        window = self.windows.close(
            end, session_timeout=settings.session_timeout, whole_slates=settings.unanswered == "passed"
        )
        self._accounts = self._accounts.plus(window, parent, self._kept)
        with one_thread():
            self._lift = compared(self._lift, window, settings, parent, self._kept)
        if not window.plans:
            return
        kept, rejected = dict(self._kept), None
        predicted = predicted_by(parent, window)
        if not parent.frozen:
            try:
                folded = fold(under(settings, parent), window, predicted)
            except EstimationError as error:
                rejected = str(error)
            else:
                self._make(folded, offset, end + settings.grace + settings.lateness, outcome)
        if self._with_episodes:
            outcome.episodes.append(
                episode_of(window, parent, self._current, kept, predicted, lift=self._lift, rejected=rejected)
            )

    def _make(self, candidate: Parameters, offset: int, effective_at: int, outcome: Outcome) -> None:
        """Give a version its number and position in the journal, and make it the current one."""
        settings, lift = candidate.settings, self._lift
        by_popularity = settings.control_share and settings.control == "popular"
        made = replace(
            self._at_position(candidate, offset),
            guarded=lift is not None and lift.exceeds(settings.max_loss, settings.guardrail_sessions),
            popular=popular(self._accounts, len(candidate.arms)) if by_popularity else (),
            model=rounded(candidate.model, intercept=candidate.settings.intercept),
            version=self._current.version + 1,
            parent_sha256=self._current.sha256,
            effective_at=effective_at,
            made_at=self.watermark.reached,
            kernels=fingerprint(),
        )
        made.sha256  # noqa: B018 - raises for what cannot be written as a record, before anything is changed
        known = self._known.get(made.version)
        if known is not None:
            try:
                check_same(made, known)
            except RoundedError:
                made = self._at_position(known, offset)
        self._set_current(made, outcome)

    def _republish_if_due(self, offset: int, outcome: Outcome) -> None:
        behind = self.windows.closed_until - (self._current.window_end or 0)
        if behind >= REPUBLISH * self.settings.window:
            self._set_current(self._at_position(self._current, offset), outcome)

    def _at_position(self, parameters: Parameters, offset: int) -> Parameters:
        needed = self.windows.needed_from
        return replace(
            parameters,
            window_end=self.windows.closed_until or None,
            journal_offset=offset,
            resume_offset=offset + 1 if needed is None else needed,
            progress=self.watermark.by_partition(),
            accounts=self._accounts,
            lift=self._lift,
        )

    def _set_current(self, parameters: Parameters, outcome: Outcome) -> None:
        if should_publish(parameters, self._newest_known):
            outcome.versions.append(parameters)
        self._current = parameters
        self.watermark.forget_lower_count()
        self._kept = keep(self._kept, parameters)
        self.windows.resize(self.settings.window)


def _pass_over(offset: int, error: Exception, outcome: Outcome) -> None:
    outcome.troubles.add("fold-passed-over", f"journal offset {offset}: {type(error).__name__}")
