"""The report as a document: figures, the period before, what changed, and warnings in words that name the ad.

Terminal, page and JSON show this document. Every row of figures has a name, and the figures of the period before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec
import numpy as np

from worker.bandit.learning import AUTO
from worker.errors import InputError
from worker.logs.ordered import OrderedLog
from worker.report.counting import (
    ADS,
    ALL,
    COURSE,
    PARTS,
    UNPLANNED,
    Counts,
    Group,
    Period,
    SessionCounter,
    chosen_period,
    columns,
)
from worker.stream.accounts import DAY
from worker.stream.ad_figures import LEAST_DISPLAYS, LEAST_PASSES, figures, reasons
from worker.stream.decoding import decode_episode
from worker.stream.features import listed
from worker.stream.misfit import advice
from worker.stream.parameters import Parameters
from worker.stream.version_records import VersionRecord

#: Features that are shown, of those whose groups differ most, and groups of each.
MOST_FEATURES, MOST_GROUPS = 6, 12
#: Ads that are named in one line.
MOST_NAMED: Final = 10
#: Share of sessions without a plan that is worth a warning.
MUCH_FALLBACK: Final = 0.01
#: Standard deviations from which the clicks of an ad clearly differ from those predicted.
CLEARLY: Final = 4.0

Document = dict[str, Any]


def report_on(log: OrderedLog, *, length: int | None, until: int | None, by: Sequence[str]) -> Document:
    """Return the report on a period of a log (see `chosen_period`); `by` are features that users are grouped by.

    Raise `InputError` if there are no versions, no sessions in the period, or no such feature.
    """
    versions, (count, first, last) = log.versions, log.openings()
    if not versions.known:
        raise InputError("no versions of this release, which have the prices: a report needs a log of all topics")
    if not count:
        raise InputError("there are no sessions to report on")
    period = chosen_period(first, last, length, until)
    if not log.openings(period.since, period.until - 1)[0]:
        has = f"they are from {Period(first, last + 1)}; give --until TIME, or --period all"
        raise InputError(f"there are no sessions in {period}: {has}")
    begins, ends = (versions.called_for(time) or min(versions.known) for time in (period.since, period.until - 1))
    known = [name for name, _, _ in columns(versions.known[ends].settings)]
    for name in by:
        if name not in known:
            raise InputError(f"--by {name}: users cannot be grouped by it, but by {listed(known)}")
    slots, counter = 7 if period.length == 7 * DAY else 8, SessionCounter(log, period)
    now, before = (counter.count(one, slots) for one in (period, period.before))
    compared = before if period.before.begins_in(first) and ALL in before else None
    newest, learned = versions.read(ends), versions.read(_learned(log, period))
    total = _row("this " + period.name, ALL, now, compared)
    course = [_row(period.part(at, slots), Group(COURSE, at, ""), now, compared) for at in range(slots)]
    ads = _ads(newest, now, compared)
    return {
        "title": str(period),
        "period": period.name,
        "since": period.since,
        "until": period.until,
        "lift": None if learned.lift is None else msgspec.to_builtins(learned.lift.figures),
        "predictions": _predictions(learned),
        "total": total,
        "course": course,
        "ads": ads,
        "features": [{"feature": name, "groups": _groups(name, now, compared)} for name in by or _telling(now)],
        "changes": [*_catalogue(versions.record(begins), versions.record(ends)), *_events(log, period)],
        "versions": [begins, ends],
        "warnings": [*_warnings(ads, total, course, now), *_doubts(learned), *_rejected(log, period)],
        "notes": [
            *_notes(log, period, last, compared=compared is not None),
            *advice(learned),
        ],
    }


def _learned(log: OrderedLog, period: Period) -> int:
    """Return the version that knows the period to its end, and hardly more; it serves only after that."""
    known = log.versions.known.items()
    begun = [number for number, one in known if (one.window_end or 0) - one.settings.window < period.until]
    return max(begun, default=min(log.versions.known))


# ── figures ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _row(name: str, group: Group, now: Counts, before: Counts | None) -> Document:
    """Return a row of figures. Revenue per thousand is of the sessions of the group, or, of an ad, of all sessions."""

    def of(counts: Counts) -> Document:
        sessions, *sums = counts[group].tolist()
        if group.feature == ADS:
            return figures(sums, float(counts[ALL][0]))
        return {"sessions": sessions, **figures(sums, sessions)}

    return {"name": name, **of(now), "before": None if before is None else of(before)}


def _ads(newest: Parameters, now: Counts, before: Counts | None) -> list[Document]:
    """Return the ads that were shown in the period or can be shown, those with the highest revenue first."""
    groups = [Group(ADS, 0, arm.arm) for arm in newest.arms]
    why = reasons(newest, np.array([now[group][1:] for group in groups]).reshape(-1, len(PARTS) - 1).T)
    found = [
        {**_row(arm.arm, group, now, before), "reward": arm.reward, "active": arm.active, "note": why.get(index)}
        for index, (arm, group) in enumerate(zip(newest.arms, groups, strict=True))
        if arm.active or now[group].any()
    ]
    return sorted(found, key=lambda ad: -ad["revenue"])


def _telling(counts: Counts) -> list[str]:
    """Return the features whose groups differ most in revenue per session."""
    revenue, spread = PARTS.index("revenue"), defaultdict[str, float](float)
    usual = counts[ALL][revenue] / counts[ALL][0]
    for group, sums in counts.items():
        if group.feature.isprintable() and sums[0]:
            spread[group.feature] += sums[0] * (sums[revenue] / sums[0] - usual) ** 2
    return sorted(spread, key=lambda feature: -spread[feature])[:MOST_FEATURES]


def _groups(feature: str, now: Counts, before: Counts | None) -> list[Document]:
    """Return the groups of a feature: the parts of a number in their order, the most frequent values of a category."""
    groups = [group for *_, group in sorted((one.place, -now[one][0], one) for one in now if one.feature == feature)]
    if len(groups) > MOST_GROUPS:
        rest, groups = groups[MOST_GROUPS - 1 :], groups[: MOST_GROUPS - 1]
        groups.append(Group(feature, 2, f"{len(rest)} more"))
        for counts in [now] if before is None else [now, before]:
            counts[groups[-1]] = np.sum([counts[group] for group in rest], axis=0)
    return [_row(group.name, group, now, before) for group in groups]


def _predictions(learned: Parameters) -> Document | None:
    """Return how many clicks came for one that was predicted, as the version knows; None before anything was."""
    known = learned.calibration
    return None if known.ratio is None else {**known.ratio._asdict(), "bad": known.is_bad}


# ── what changed ─────────────────────────────────────────────────────────────────────────────────────────────────────


class _Cause(msgspec.Struct):
    """The record of the journal that made a version."""

    kind: str = ""
    action: str = ""
    version: int | None = None


_decode_cause: Final = msgspec.json.Decoder(_Cause).decode


def _catalogue(then: VersionRecord, now: VersionRecord) -> Iterator[Document]:
    """Yield how the ads of two versions differ, in words."""
    was, has = ({arm.arm: arm for arm in head.arms} for head in (then, now))
    for words, names in (
        ("new", [name for name in has if name not in was]),
        ("no longer shown", [name for name in was if was[name].active and not has[name].active]),
        ("shown again", [name for name in was if has[name].active and not was[name].active]),
    ):
        if names:
            yield {"at": None, "text": f"{words}: {listed(names, MOST_NAMED)}"}
    for name, arm in was.items():
        if has[name].reward != arm.reward:
            yield {"at": None, "text": f"ad {name}: a click pays {has[name].reward:g}, it was {arm.reward:g}"}


def _events(log: OrderedLog, period: Period) -> Iterator[Document]:
    """Yield the orders of the period, and when a change of users or ads was noticed, in words."""
    for number, recorded in sorted(log.versions.known.items()):
        if not period.since <= recorded.effective_at < period.until:
            continue
        cause = _decode_cause(log.journal_record(recorded.records[0].journal_offset) or b"{}")
        words = {
            "rollback": f"what was learned since version {cause.version} was taken back (rollback)",
            "freeze": "learning was stopped (freeze)",
            "unfreeze": "learning went on (unfreeze)",
            "import": "what was learned elsewhere was taken over (import)",
            "features": "other features of users or ads were declared",
        }.get(cause.action or cause.kind)
        is_fold = cause.kind in ("", "progress") and recorded.settings.forgetting == AUTO
        if is_fold:
            head = log.versions.record(number)
            if head.kept < 1:
                words = f"users or ads changed: what was learned before counts {head.kept:.0%} since then"
            elif head.changed:
                words = f"users' taste for these ads changed, they are learned anew: {listed(head.changed, MOST_NAMED)}"
        if words:
            yield {"at": recorded.effective_at, "text": words}


# ── warnings ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _warnings(ads: Sequence[Document], total: Document, course: Sequence[Document], now: Counts) -> Iterator[Document]:
    """Yield what somebody should look at; every warning about ads names them."""
    for ad in ads:
        if ad["active"] and ad["displays"] >= LEAST_DISPLAYS and (trouble := _trouble(ad, total, course, now)):
            yield {"arm": ad["name"], "text": f"ad {ad['name']}: {ad['displays']:,.0f} displays, {trouble}"}
    unseen = [ad["name"] for ad in ads if ad["active"] and not ad["displays"]]
    if unseen and total["displays"] >= LEAST_DISPLAYS * len(ads):
        yield {"arm": None, "text": f"ads that were never shown: {listed(unseen, MOST_NAMED)}"}
    if (fallback := now[UNPLANNED][0]) > MUCH_FALLBACK * total["sessions"]:
        text = f"{fallback:,.0f} sessions got the highest-paying ads: there was no room or no time for a plan"
        yield {"arm": None, "text": text}


def _trouble(ad: Document, usual: Document, course: Sequence[Document], now: Counts) -> str | None:
    """Return what is wrong with an ad, compared with all ads; None if it does well."""
    silent, displays = "", 0.0
    for at in reversed(range(len(course))):
        part = now[Group(COURSE, at, ad["name"])]
        if part[PARTS.index("answered")]:
            break
        silent, displays = course[at]["name"], displays + float(part[1])
    if displays >= LEAST_DISPLAYS and displays * usual["answer_rate"] >= LEAST_PASSES:
        since = "" if displays == ad["displays"] else f" to the last {displays:,.0f}, since {silent}"
        return f"no feedback at all{since}; its pixel may be broken"
    if ad["note"] == "hardly ever answered":
        all_ads = f"all ads: {usual['answer_rate']:.1%}"
        return f"{ad['answer_rate']:.1%} of them answered ({all_ads}); its pixel may be broken, or users leave at it"
    if ad["note"] == "hardly clicked":
        return f"{ad['click_rate']:.2%} of them clicked (all ads: {usual['click_rate']:.2%}); is it worth its place?"
    if ad["note"]:
        earned, usually = (one["revenue"] / one["displays"] for one in (ad, usual))
        return f"{earned:.3g} earned by each (all ads: {usually:.3g}); a click pays only {ad['reward']:g}"
    return None


def _doubts(learned: Parameters) -> Iterator[Document]:
    """Yield what speaks against the policy, or against the figures."""
    lift = learned.lift
    if lift is not None and lift.is_loss:
        then = "; no ads are tried out meanwhile" if learned.guarded else ""
        yield {"arm": None, "text": f"adcascade earns less than {lift.name}: {lift.sentence}{then}"}
    if lift is not None and (size := lift.mismatch) is not None:
        text = f"the control group has {size:.0%} of the sessions that it should have: do not trust the comparison"
        yield {"arm": None, "text": text}
    known, names = learned.calibration, [arm.arm for arm in learned.arms]
    for ad in known.worst(names) if known.is_bad else ():
        if abs(ad.deviations) > CLEARLY:
            text = f"ad {ad.arm}: {ad.clicks:,} clicks lately, where {ad.predicted:,.0f} were predicted"
            yield {"arm": ad.arm, "text": text}


def _rejected(log: OrderedLog, period: Period) -> Iterator[Document]:
    episodes = [decode_episode(value) for value in log.values("episodes")]
    if found := [one for one in episodes if one.rejected and period.since <= one.window_start < period.until]:
        yield {"arm": None, "text": f"nothing was learned {len(found):,} times, lastly because {found[-1].rejected}"}


def _notes(log: OrderedLog, period: Period, last: int, *, compared: bool) -> Iterator[str]:
    if not compared:
        yield f"nothing to compare with: the {period.name} before is not in the source"
    if last < period.until - 1 + log.versions.longest("session_timeout"):
        yield "the last sessions may still be answered"
