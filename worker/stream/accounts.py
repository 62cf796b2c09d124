"""The accounts of the ads: what closed windows add up to, per ad, since the start and on the current day.

Rules that hold in this file:

- The learner adds every window that it closes, also while it is frozen or when a fold is rejected. Accounts belong to
  the position of a version in the journal and not to its model: the hash does not cover them, a rollback or an import
  leaves them as they are, and a learner that resumes from a version goes on with its accounts.
- A display is an answered position, or the one after the last answer, as in the fold. It is explored if its mode is
  one of `EXPLORED`.
- A click earns the price of the version that served it; if that is no longer kept, of the parent of the fold.
- An uncertain session counts as a session, and no display of it is known.
- A day is a day of UTC. A window belongs to the day in which it begins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Final

import numpy as np
from msgspec import Meta, Struct

from worker.bandit.arrays import ArrayValue, Floats, frozen_array
from worker.errors import InputError
from worker.stream.events import MOST, Mode, described
from worker.stream.joining import ClosedWindow
from worker.stream.packing import packed, unpacked

if TYPE_CHECKING:  # a version has accounts
    from worker.stream.parameters import Parameters

DAY: Final = 86_400_000
#: The rows of the sums.
ROWS: Final = ("displays", "clicks", "revenue", "answered", "explored")
EXPLORED: Final[frozenset[Mode]] = frozenset(("explore", "warmup", "random"))
#: What a sum is cut to that leaves the floating-point range.
_LARGEST: Final = 1e300
#: Bytes of the record of accounts without sums.
_RECORD_BYTES: Final = 192

_WHOLE: Final[dict[str, Any]] = {"minimum": 0, "maximum": MOST}
_PACKED: Final[dict[str, Any]] = {"contentEncoding": "base64", "pattern": "^[A-Za-z0-9+/]*={0,2}$"}


class AccountsRecord(Struct, frozen=True, kw_only=True):
    """Sums of the windows that are closed, per ad.

    The sums are base64 of little-endian float64 numbers, shape (5, K): displays, clicks, revenue, answered displays and
    explored displays. Ads that were added since the last closed window may be missing.
    """

    since: Annotated[int, described("Start of the first window.", **_WHOLE)]
    day: Annotated[int, described("Day of the last window, UTC, in days since the epoch.", **_WHOLE)]
    sessions: Annotated[int, Meta(ge=0, le=MOST, description="Sessions of all windows.")]
    sessions_today: Annotated[int, Meta(ge=0, le=MOST, description="Sessions of that day.")]
    total: Annotated[str, described("Sums of all windows.", **_PACKED)]
    today: Annotated[str, described("Sums of that day.", **_PACKED)]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sums(ArrayValue):
    """The number of sessions, and sums per ad, (5, K), with a row for each of `ROWS`.

    Ads that were added since are missing: their sums are 0.
    """

    sessions: int = 0
    ads: Floats = field(default_factory=lambda: np.zeros((len(ROWS), 0)))

    def __post_init__(self) -> None:
        object.__setattr__(self, "ads", frozen_array(self.ads))
        if self.ads.ndim != 2 or len(self.ads) != len(ROWS) or (self.ads < 0).any():
            raise InputError(f"accounts must have {len(ROWS)} rows of sums, a column per ad")

    def plus(self, other: Sums) -> Sums:
        """Return both together."""
        arms = max(self.ads.shape[1], other.ads.shape[1])
        return Sums(sessions=min(self.sessions + other.sessions, MOST), ads=self.of(arms) + other.of(arms))

    def of(self, arms: int) -> Floats:
        """Return the sums of the first `arms` ads, (5, arms)."""
        return np.pad(self.ads, ((0, 0), (0, max(0, arms - self.ads.shape[1]))))[:, :arms]


@dataclass(frozen=True, slots=True, kw_only=True)
class Accounts:
    """The sums since the time `since`, the start of the first window, and those of `day`, counted from the epoch."""

    since: int = 0
    day: int = 0
    total: Sums = field(default_factory=Sums)
    today: Sums = field(default_factory=Sums)

    def plus(self, window: ClosedWindow, parent: Parameters, kept: Mapping[int, Parameters]) -> Accounts:
        """Return the accounts with a window that is closed under `parent`; `kept` are the versions that served it."""
        if not window.sessions:
            return self
        sums, day = window_sums(window, parent, kept), window.start // DAY
        return Accounts(
            since=self.since if self.total.sessions else window.start,
            day=day,
            total=self.total.plus(sums),
            today=self.today.plus(sums) if day == self.day else sums,
        )

    def document(self) -> dict[str, Any]:
        """Return the fields of an `AccountsRecord`."""
        sessions = {"sessions": self.total.sessions, "sessions_today": self.today.sessions}
        sums = {name: packed("", sums.ads)["data"] for name, sums in (("total", self.total), ("today", self.today))}
        return {"since": self.since, "day": self.day, **sessions, **sums}

    @classmethod
    def read(cls, record: AccountsRecord, arms: int) -> Accounts:
        """Return the accounts in the record of a version; raise `InputError` if they do not fit."""
        total, today = _unpacked(record.sessions, record.total), _unpacked(record.sessions_today, record.today)
        if max(total.ads.shape[1], today.ads.shape[1]) > arms:
            raise InputError(f"accounts have more ads than the {arms} of the catalogue")
        return cls(since=record.since, day=record.day, total=total, today=today)


NOTHING: Final = Accounts()


def accounts_size(arms: int) -> int:
    """Return the most bytes that the record of accounts can have."""
    return _RECORD_BYTES + 2 * 4 * (8 * len(ROWS) * arms // 3 + 1)


def _unpacked(sessions: int, data: str) -> Sums:
    try:
        return Sums(sessions=sessions, ads=unpacked({"shape": (len(ROWS), -1), "data": data}))
    except ValueError as error:
        raise InputError(f"accounts are damaged: {error}") from None


def window_sums(window: ClosedWindow, parent: Parameters, kept: Mapping[int, Parameters]) -> Sums:
    """Return the sums of a window over the ads of `parent`."""
    rows, arms = window.rows, window.slates.arms(window.codes, parent.indices)
    # A slate that was drawn uniformly has no position with the mode `explore`.
    flags = b"".join([plan.explored or bytes([plan.random]) * len(plan.slate) for plan in window.plans])
    revenue = np.zeros(len(rows))
    revenue[window.clicked] = click_prices(window, parent, kept)
    explored = np.frombuffer(flags, np.bool_)[window.slates.begins[rows] + window.positions - 1]
    columns = np.ones(len(rows)), window.clicked, revenue, window.answered, explored
    known, sums = arms >= 0, np.empty((len(ROWS), len(parent.arms)))
    with np.errstate(all="ignore"):
        for row, column in enumerate(columns):
            sums[row] = np.bincount(arms[known], column[known], minlength=len(parent.arms))
    return Sums(sessions=window.sessions, ads=np.nan_to_num(sums, nan=0.0, posinf=_LARGEST))


def click_prices(window: ClosedWindow, parent: Parameters, kept: Mapping[int, Parameters]) -> Floats:
    """Return the revenue of each click, by the version that served it, or else by `parent`."""
    rows, codes = window.rows[window.clicked].tolist(), window.codes[window.clicked].tolist()
    versions = [kept.get(window.plans[row].parameters_version, parent) for row in rows]
    prices: dict[int, list[float]] = {}
    for version in {version.version: version for version in versions}.values():
        rewards = {arm.arm: arm.reward for arm in version.arms}
        prices[version.version] = [rewards.get(name, 0.0) for name in window.slates.names]
    return np.array([prices[version.version][code] for version, code in zip(versions, codes, strict=True)])
