"""The report as a document: figures, the period before, what changed, and warnings in words that name the ad.

The table in the terminal, the page and the JSON all show this document.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np

from worker.bandit.learning import AUTO
from worker.errors import InputError
from worker.logs.ordered import OrderedLog
from worker.logs.versions import VersionHead
from worker.report.counting import PARTS, Counts, Group, SessionCounter, Sums, columns
from worker.report.period import Period, check_not_empty, chosen_period
from worker.stream.accounts import DAY, ROWS
from worker.stream.ad_figures import figures, reasons
from worker.stream.decoding import decode_episode
from worker.stream.episodes import LEAST_DISPLAYS
from worker.stream.features import listed
from worker.stream.parameters import Parameters

#: Features whose groups are shown: those whose groups differ most; and values of a category.
MOST_FEATURES: Final = 6
MOST_GROUPS: Final = 8
#: Ads that are named in one line.
MOST_NAMED: Final = 10
#: Share of sessions without a plan that is worth a warning.
MUCH_FALLBACK: Final = 0.01


class _Cause(msgspec.Struct):
    """The record of the journal that made a version."""

    kind: str = ""
    action: str = ""
    version: int | None = None


_decode_cause: Final = msgspec.json.Decoder(_Cause).decode


def report_on(log: OrderedLog, *, length: int | None, until: int | None, by: Sequence[str]) -> dict[str, Any]:
    """Return the report on a period of a log (see `chosen_period`); `by` are features that users are grouped by.

    Raise `InputError` if the log has no versions, no sessions in the period, or no such feature.
    """
    versions = log.versions
    if not versions.known:
        raise InputError("there are no versions of the parameters: a report needs a log of all topics (the prices)")
    _, first, last = log.openings()
    period = chosen_period(first, last, length, until)
    check_not_empty(log.openings(period.since, period.until - 1)[0], period, first, last)
    begins, ends = (_in_force(log, time) for time in (period.since, period.until - 1))
    _check_features(log, ends, by)
    slots = 7 if period.length == 7 * DAY else 24 if period.length == DAY else 12
    has_before = period.before.begins_in(first)
    counter = SessionCounter(log, period)
    now, *rest = counter.count([period, period.before] if has_before else [period], slots)
    before = rest[0] if rest and rest[0].total[0] else None
    newest = versions.read(ends)
    ads = _ads(newest, now, before)
    return {
        "period": period.name,
        "title": str(period),
        "since": period.since,
        "until": period.until,
        "total": _total(now),
        "before": None if before is None else _total(before),
        "course": _course(period, slots, now, before),
        "ads": ads,
        "features": _features(now, before, by),
        "changes": [*_catalogue(versions.head(begins), versions.head(ends)), *_events(log, period)],
        "versions": {"first": begins, "last": ends},
        "warnings": [*_warnings(ads, now), *_windows(log, period)],
        "notes": list(_notes(log, period, last, before, now)),
    }


def _in_force(log: OrderedLog, time: int) -> int:
    found = log.versions.called_for(time)
    return min(log.versions.known) if found is None else found


def _check_features(log: OrderedLog, version: int, by: Sequence[str]) -> None:
    settings = log.versions.known[version].settings
    known = [name for name, _, _ in columns(settings)]
    for name in by:
        if name not in known:
            declared = settings.features.context if settings.features is not None else ()
            hashed = any(feature.name == name for feature in declared)
            why = "is hashed, so its values are not kept" if hashed else "is no feature of users"
            raise InputError(f"--by {name}: {why}; users can be grouped by {listed(known)}")


# ── figures ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _figures(sums: Sums, sessions: float) -> dict[str, Any]:
    return {"sessions": sums[0], **figures(sums[1:], sessions)}


def _total(counts: Counts) -> dict[str, Any]:
    sums = counts.total
    per_session = sums[PARTS.index("revenue")] / sums[0] if sums[0] else None
    return {**_figures(sums, sums[0]), "revenue_per_session": per_session}


def _course(period: Period, slots: int, now: Counts, before: Counts | None) -> list[dict[str, Any]]:
    """Return the revenue per session along the period, and at the same place in the period before."""
    earned = [
        [sums.get(slot, [0.0] * len(PARTS)) for slot in range(slots)] if sums is not None else [None] * slots
        for sums in (now.slots, None if before is None else before.slots)
    ]
    at = PARTS.index("revenue")
    return [
        {
            "since": period.since + slot * period.length // slots,
            "sessions": this[0] if this else 0.0,
            "revenue": this[at] if this else 0.0,
            "revenue_per_session": this[at] / this[0] if this and this[0] else None,
            "before": other[at] / other[0] if other and other[0] else None,
        }
        for slot, (this, other) in enumerate(zip(*earned, strict=True))
    ]


def _ads(newest: Parameters, now: Counts, before: Counts | None) -> list[dict[str, Any]]:
    """Return the ads that were shown in the period or can be shown, those with the highest revenue first."""
    sums = np.array([now.ads[arm.arm][1:] if arm.arm in now.ads else [0.0] * len(ROWS) for arm in newest.arms])
    why = reasons(newest, sums.T) if len(sums) else {}
    found = [
        {
            "arm": arm.arm,
            "reward": arm.reward,
            "active": arm.active,
            **_figures(now.ads[arm.arm], now.total[0]),
            "before": None if before is None else _figures(before.ads[arm.arm], before.total[0]),
            "note": why.get(index),
        }
        for index, arm in enumerate(newest.arms)
        if arm.active or arm.arm in now.ads
    ]
    return sorted(found, key=lambda ad: -ad["revenue"])


def _features(now: Counts, before: Counts | None, by: Sequence[str]) -> list[dict[str, Any]]:
    """Return the groups of users by feature: those of `by`, or of the features whose groups differ most."""
    revenue = PARTS.index("revenue")
    usual = now.total[revenue] / now.total[0]
    spread: defaultdict[str, float] = defaultdict(float)
    for group, sums in now.groups.items():
        spread[group.feature] += sums[0] * (sums[revenue] / sums[0] - usual) ** 2
    return [
        {
            "feature": name,
            "groups": [
                {
                    "group": group.name,
                    **_figures(sums, sums[0]),
                    "before": None if before is None else _figures(then := before.groups[group], then[0]),
                }
                for group, sums in _ordered(name, now)
            ],
        }
        for name in by or sorted(spread, key=lambda feature: -spread[feature])[:MOST_FEATURES]
    ]


def _ordered(feature: str, counts: Counts) -> list[tuple[Group, Sums]]:
    """Return the groups of a feature: the parts of a number in their order, the most frequent values of a category."""
    groups = [(group, sums) for group, sums in counts.groups.items() if group.feature == feature]
    return sorted(groups, key=lambda one: (one[0].place, -one[1][0]))[:MOST_GROUPS]


# ── what changed ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _catalogue(then: VersionHead, now: VersionHead) -> Iterator[dict[str, Any]]:
    """Yield how the ads of two versions differ, in words."""
    was, is_ = ({arm.arm: arm for arm in head.arms} for head in (then, now))
    shown_then, shown_now = ({name for name, arm in of.items() if arm.active} for of in (was, is_))
    for words, names in (
        ("new: {}", [name for name in is_ if name not in was]),
        ("no longer shown: {}", [name for name in is_ if name in shown_then - shown_now]),
        ("shown again: {}", [name for name in is_ if name in was and name in shown_now - shown_then]),
    ):
        if names:
            yield {"at": None, "text": words.format(listed(names, MOST_NAMED))}
    for name, arm in is_.items():
        if name in was and arm.reward != was[name].reward:
            yield {"at": None, "text": f"{name}: a click pays {arm.reward:g}, it was {was[name].reward:g}"}


def _events(log: OrderedLog, period: Period) -> Iterator[dict[str, Any]]:
    """Yield the orders of the period, and when a change of users or ads was noticed, in words."""
    for number, recorded in sorted(log.versions.known.items()):
        if not period.since <= recorded.effective_at < period.until:
            continue
        record = log.journal_record(recorded.records[0].journal_offset)
        cause, kept = _decode_cause(record or b"{}"), log.versions.head(number).kept
        words = {
            "rollback": f"what was learned since version {cause.version} was taken back (rollback)",
            "freeze": "learning was stopped (freeze)",
            "unfreeze": "learning went on (unfreeze)",
            "import": "what was learned elsewhere was taken over (import)",
            "features": "other features of users or ads were declared",
        }.get(cause.action or cause.kind)
        if cause.kind in ("", "progress") and kept < 1 and recorded.settings.forgetting == AUTO:
            words = f"users or ads changed: what was learned before counts {kept:.0%} since then"
        if words:
            yield {"at": recorded.effective_at, "text": words}


# ── warnings ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _warnings(ads: Sequence[Mapping[str, Any]], now: Counts) -> Iterator[dict[str, Any]]:
    """Yield what somebody should look at; every warning about ads names them."""
    for ad in ads:
        if ad["active"] and ad["displays"] >= LEAST_DISPLAYS and (trouble := _trouble(ad, _total(now))):
            yield {"arm": ad["arm"], "text": f"ad {ad['arm']}: {ad['displays']:,.0f} displays, {trouble}"}
    if unseen := [ad["arm"] for ad in ads if ad["active"] and not ad["displays"]]:
        yield {"arm": None, "text": f"not shown once: {listed(unseen, MOST_NAMED)}"}
    if (fallback := now.modes["fallback"]) > MUCH_FALLBACK * sum(now.modes.values()):
        text = f"{fallback:,} sessions got the highest-paying ads, unplanned: there was no room or no time for a plan"
        yield {"arm": None, "text": text}


def _trouble(ad: Mapping[str, Any], usual: Mapping[str, Any]) -> str | None:
    """Return what is wrong with an ad, compared with all ads; None if it does well."""
    if not ad["answer_rate"] and usual["answer_rate"]:
        return "no feedback at all; its pixel may be broken"
    if ad["note"] == "hardly ever answered":
        all_ads = f"all ads: {usual['answer_rate']:.1%}"
        return f"{ad['answer_rate']:.1%} of them answered ({all_ads}); its pixel may be broken, or users leave at it"
    if ad["note"] == "hardly clicked":
        return f"{ad['click_rate']:.2%} of them clicked (all ads: {usual['click_rate']:.2%}); is it worth its place?"
    if ad["note"]:
        earned, usually = (one["revenue"] / one["displays"] for one in (ad, usual))
        return f"{earned:.3g} earned by each (all ads: {usually:.3g}); a click pays only {ad['reward']:g}"
    return None


def _windows(log: OrderedLog, period: Period) -> Iterator[dict[str, Any]]:
    """Yield what the records of closed windows say."""
    episodes = [one for value in log.values("episodes") if (one := decode_episode(value)).rejected is not None]
    if rejected := [one for one in episodes if period.since <= one.window_start < period.until]:
        text = f"{len(rejected):,} times nothing was learned, the last time because {rejected[-1].rejected}"
        yield {"arm": None, "text": text}


def _notes(log: OrderedLog, period: Period, last: int, before: Counts | None, now: Counts) -> Iterator[str]:
    if before is None:
        yield f"there is nothing to compare with: the {period.name} before is not in the source"
    timeout = log.versions.longest("session_timeout")
    if last < period.until - 1 + timeout:
        yield "the last sessions may still be answered"
    if now.uncertain:
        crash = "after a crash, their users may have seen another slate"
        yield f"{now.uncertain:,} sessions count without displays: {crash}"
