"""Explanations as text and as a page: the positions of a slate with their reasons, a session served, `--why-not`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from worker.bandit.policies import POLICIES
from worker.console import listing, moment
from worker.replay.one_session import ServedSession
from worker.report.page import glossary, page
from worker.stream.explanation import GREEDY, SCORES, Candidate, Explanation, Position
from worker.stream.features import listed
from worker.stream.parameters import Parameters
from worker.stream.tastes import BASE_RATE, Contribution
from worker.stream.why_not import ODDS_STEP, STEP, UNKNOWN, Needed, WhyNot

TOP = 5  # arms in the table of a position
STRONGEST = 5  # parts of log-odds that are named
MOST_OUT = 12  # arms that could not be shown, of one reason
MOST_BARS = 10  # of a picture
WIDTH, LABEL, NUMBER, LINE = 720, 190, 70, 20  # of a picture, in its units
LONGEST_LABEL = 26  # characters

#: Columns of the numbers of a candidate, with their fields.
NUMBERS = {
    "probability": "probability",
    "goes on": "answer_rate",
    "reward": "reward",
    "Q": "q",
    **{name: name for name in ("width", "spread", "bonus", "score")},
}

#: What these and the words next to them mean, for the page.
WORDS = {
    "probability": "of a click at this position, as estimated for this user",
    "goes on": "share of the users without a click who look at the next ad",
    "reward": "what a click earns",
    "Q": "expected revenue from this position on: of this ad, and of the best ones after it",
    "width": "standard deviation of the log-odds of a click: how little is known of the ad",
    "spread": "factor of this session on the bonus, so that sessions try out different ads",
    "bonus": "what is added to Q in order to try the ad out; 0 if the position does not explore",
    "score": "Q and bonus; the highest is shown, unless a lot or an order chose",
    "log-odds": "ln(p / (1 − p)) of a click; the parts after the base rate are of this user, +0.7 doubles the odds",
    "its turn": "is over: ads of a slate follow one order, and one after this ad was shown",
}

# ── a slate ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def report(parameters: Parameters, reasons: Explanation, *, most: int = TOP) -> str:
    """Return the best arms of every position, and the reason for the choice in words."""
    settings = parameters.settings
    active = sum(arm.active for arm in parameters.arms)
    with_repeats, without = POLICIES[settings.policy].has_bonus
    bonus = f"{settings.bonus} bonus" if (with_repeats if settings.repeats else without) else "no repeats"
    policy = f"{settings.policy}, {bonus}, β = {settings.beta}" if with_repeats else settings.policy
    lines = [f"version {parameters.version}: {policy}; {active} of {len(parameters.arms)} arms active"]
    lines += [f"note: {text}" for text in reasons.notes]
    if reasons.slate:
        lines.append(f"slate: {' → '.join(reasons.slate)}")
    for position in reasons.positions:
        lines += ["", heading(position), numbers(parameters, position, most)]
    return "\n".join(lines)


def heading(position: Position) -> str:
    """Return the choice of a position and its reason in words."""
    if position.choice is None:
        return "no arm was eligible"
    return f"position {position.position}, {position.mode}: {reason(position)}"


def numbers(parameters: Parameters, position: Position, most: int | None = None) -> str:
    """Return the numbers of the arms at a position, the choice first, and why the others could not be shown."""
    rewards = {arm.arm: arm.reward for arm in parameters.arms}
    rows = [
        {**fields_of(one), "reward": rewards[one.arm], "mark": "→" if one.arm == position.choice else ""}
        for one in ranked(position)
    ]
    lines = []
    if rows:
        columns = {name: f"{{{field}:.4g}}" for name, field in NUMBERS.items() if field in rows[0]}
        lines.append(listing({"": "{mark}", "arm": "{arm}", **columns}, rows, most))
        chosen = ranked(position)[0]
        lines.append(f"   log-odds of {chosen.arm}: {in_parts(chosen.contributions)}")
    by_reason: dict[str, list[str]] = {}
    for arm, why in position.out.items():
        by_reason.setdefault(why, []).append(arm)
    lines += [f"   {why}: {listed(arms, MOST_OUT)}" for why, arms in by_reason.items()]
    return "\n".join(lines)


def ranked(position: Position) -> list[Candidate]:
    """Return the arms that competed for a position, the choice first, then by falling score."""
    return sorted(position.arms, key=lambda one: (one.arm != position.choice, -one.score))


def fields_of(one: Candidate) -> dict[str, Any]:
    """Return a candidate in its JSON form."""
    return {name: value for name in one.__slots__ if (value := getattr(one, name)) is not None}


def in_parts(parts: tuple[Contribution, ...]) -> str:
    """Return log-odds as a sum of named parts, the strongest features after the base rate."""
    base = next(part for part in parts if part.feature == BASE_RATE)
    features = [part for part in parts if part is not base]
    named = [f"{base.feature} {base.contribution:+.2f}", *map(_named, features[:STRONGEST])]
    if rest := features[STRONGEST:]:
        named.append(f"{len(rest)} more {sum(part.contribution for part in rest):+.2f}")
    return f"{sum(part.contribution for part in parts):+.2f} = {', '.join(named)}"


def _named(part: Contribution) -> str:
    if part.value is None:
        return f"{part.feature} missing {part.contribution:+.2f}"
    # The name of a mark has its value already, as in device=mobile.
    value = "" if "=" in part.feature or "#" in part.feature else f"={part.value:.4g}"
    return f"{part.feature}{value} {part.contribution:+.2f}"


_LOT = "{arm} was drawn by lot, each of the {count} eligible arms with the same probability"
#: Reasons of choices that no score has made.
_WAYS = {
    "lot": _LOT,
    "epsilon": f"{_LOT} (epsilon)",
    "fallback": "the highest-paying eligible arms, because no slate could be planned or there was no room",
}


def reason(position: Position) -> str:
    """Return the reason for a choice in words."""
    chosen = next(one for one in position.arms if one.arm == position.choice)
    if position.way in _WAYS and not (position.way == "epsilon" and position.mode == "exploit"):
        return _WAYS[position.way].format(arm=chosen.arm, count=len(position.arms))
    stay = "" if chosen.answer_rate is None else f", by the {chosen.answer_rate:.0%} who then go on"
    later = f"{position.continuation:.4g} can still be earned when it is passed over{stay}"
    if position.continuation == 0:
        later = "nothing is planned after it"
    surest = max(position.arms, key=lambda one: one.q)
    others = [one for one in position.arms if one is not chosen]
    if position.way == "order":
        best = f" ({surest.arm}: {surest.q:.4g})" if surest.q > chosen.q else ""
        return f"{chosen.arm} is next in the order, {chosen.q:.4g}{best}; {later}"
    if not others:
        return f"{chosen.arm} is the only arm left; {later}"
    if surest is chosen or surest.q <= chosen.q:
        second = max(others, key=lambda one: one.q)
        return (
            f"{chosen.arm} is expected to earn the most, {chosen.q:.4g} (next: {second.arm}, {second.q:.4g}); {later}"
        )
    if chosen.bonus > 0:
        return (
            f"{surest.arm} is expected to earn more ({surest.q:.4g} against {chosen.q:.4g}), but {chosen.arm} may well "
            f"be better than it looks (bonus {chosen.bonus:.4g} against {surest.bonus:.4g}); {later}"
        )
    return f"{chosen.arm} and {surest.arm} are as good as equal ({chosen.q:.7g}, {surest.q:.7g}); {later}"


# ── a session ────────────────────────────────────────────────────────────────────────────────────────────────────────


def verdict(served: ServedSession) -> list[str]:
    """Return whether the session planned again is the recorded one; a difference is loud."""
    if served.planned is None:
        return ["planned by another system (imported): there is nothing to plan again"]
    if not served.differences:
        return ["planned again: the recorded decision, to the letter"]
    loud = "!!! PLANNED AGAIN, THIS IS NOT THE RECORDED DECISION. What follows explains the plan, not what was shown."
    return [loud, *(f"!!! {line}" for line in served.differences)]


def facts(served: ServedSession) -> dict[str, str]:
    """Return what is known of a session, by headings."""
    arrival = served.arrival
    modes: tuple[str, ...] = served.planned.modes if served.planned else ("imported",)
    if "control" in modes:
        modes = (f"control ({served.parameters.settings.control})",)
    notes = {"note": f"{served.others} earlier sessions have the same id; this is the last"} if served.others else {}
    return {
        "session": arrival.session_id,
        "arrived": f"{moment(arrival.occurred_at)} UTC",
        "served by": f"version {served.parameters.version}, mode {', '.join(dict.fromkeys(modes)) or 'none'}",
        "context": _context(served),
        "excluded": ", ".join(arrival.exclude) or "nothing",
        "shown": " → ".join(served.slate) or "nothing: no arm was eligible",
        "answered": _answers(served),
        "learned": _learned(served),
        **notes,
    }


def _context(served: ServedSession) -> str:
    """Return the context as it was sent, or else from its columns, without missing values."""
    features, numbers = served.parameters.settings.features, served.arrival.context
    if served.given:
        values = {name: int(value) if isinstance(value, bool) else value for name, value in served.given.items()}
        return ", ".join(f"{name}={value}" for name, value in values.items())
    if features is None or not features.context:
        return ", ".join(f"x[{place}]={value:.10g}" for place, value in enumerate(numbers, start=1))
    columns = zip(features.context_names, features.number_columns, numbers, strict=True)
    named = (f"{name}={value:.10g}" if is_number else name if value else "" for name, is_number, value in columns)
    return ", ".join(one for one in named if one and not one.endswith("=nan"))


def _answers(served: ServedSession) -> str:
    passed = sum(not one.clicked for one in served.reactions.values())
    if served.clicked:
        after = (served.reactions[served.clicked].occurred_at - served.arrival.occurred_at) / 1000
        return f"click on {served.slate[served.clicked - 1]}, position {served.clicked}, after {after:.1f} s"
    if passed:
        return f"{passed} passed over, no click" + ("" if passed == len(served.slate) else "; then no answer")
    return "no answer"


def _learned(served: ServedSession) -> str:
    learning = served.learning
    if learning.version is None:
        return f"nothing: {learning.reason} (window until {moment(learning.window_end)} UTC)"
    late = f"; {learning.late} answers came too late for it" if learning.late else ""
    displays = "1 display" if learning.displays == 1 else f"{learning.displays} displays"
    return f"version {learning.version} has {displays} of it (window until {moment(learning.window_end)} UTC){late}"


# ── why not ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def why_lines(said: WhyNot, reasons: Explanation) -> list[str]:
    """Return what would have had to be different for an arm to be shown."""
    if said.drawn is not None:
        lot = f"a lot chose the slate: the chance {said.drawn:.1%} for position 1, as every eligible arm"
        return [f"{said.obstacle}; without that, {lot}" if said.obstacle else lot]
    lines = []
    if said.obstacle == UNKNOWN:
        return [UNKNOWN]
    if said.obstacle:
        lines.append(f"{said.obstacle}; without that it would be {_place(said.without_obstacle)}")
    elif said.position:
        lines.append(f"it is {_place(said.position)}")
    if said.revenue is None:
        return [*lines, "the order is fixed: neither its revenue nor its click probability counts"]
    lines.append(_needed(said.revenue, "revenue per click", "{:.5g}"))
    if said.probability is not None:
        lines.append(_needed(said.probability, "click probability at position 1", "{:.4g}"))
    steps = f"{STEP - 1:.0%} of the revenue and {ODDS_STEP} of the log-odds"
    lines.append(f"tried upwards in steps of {steps}: a narrower range may be missed")
    lines += _bonus(said, reasons)
    against = [part for part in said.parts if part.contribution < 0 and part.feature != BASE_RATE]
    named = ", ".join(map(_named, against[:STRONGEST]))
    lines.append(
        f"against it, of this user: {named} (log-odds)" if against else "nothing of this user speaks against it"
    )
    return lines


def _place(position: int) -> str:
    return f"at position {position}" if position else "in no position"


def _needed(needed: Needed, what: str, form: str) -> str:
    found = [f"{what}: {form.format(needed.now)}"]
    for least, where in ((needed.anywhere, "in the slate"), (needed.first, "at position 1")):
        if least is None:
            found.append(f"no other was found by which it is {where}")
        elif least != needed.now:
            found.append(f"from {form.format(least)} ({least / needed.now - 1:+.0%}) on it is {where}")
    return "; ".join(found)


def _bonus(said: WhyNot, reasons: Explanation) -> list[str]:
    if said.if_explored is not None:
        return [
            f"bonus: this session did not explore; if it had, with all bonuses it would be {_place(said.if_explored)}"
        ]
    position = next((one for one in reasons.positions if one.way in (SCORES, GREEDY)), None)
    mine = next((one for one in position.arms if one.arm == said.arm), None) if position else None
    if position is None or mine is None or mine.arm == position.choice:
        return []
    chosen = next(one for one in position.arms if one.arm == position.choice)
    return [
        f"score at position 1: {mine.score:.4g} = {mine.q:.4g} + bonus {mine.bonus:.4g}, against {chosen.score:.4g} of "
        f"{chosen.arm}"
    ]


# ── a page ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def explanation(
    title: str,
    head: Mapping[str, str],
    said: Sequence[str],
    notes: Sequence[str],
    sections: Sequence[tuple[str, str, str]],
) -> str:
    """Return the page: the verdict on planning again, facts, notes, and sections of title, picture and numbers."""
    loud = any(line.startswith("!!!") for line in said)
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in head.items())
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="{"loud" if loud else "good"}">{"<br>".join(map(escape, said))}</p>',
        f'<table class="facts">{rows}</table>',
        f"<p>{'<br>'.join(map(escape, notes))}</p>",
        *(
            f"<section><h2>{escape(heading)}</h2>{picture}<pre>{escape(numbers)}</pre></section>"
            for heading, picture, numbers in sections
        ),
    ]
    return page(title, [*parts, glossary(WORDS)])


def picture(position: Position) -> str:
    """Return the scores of the best arms at a position, the bonus apart."""
    best = ranked(position)[:MOST_BARS]
    scale = (WIDTH - LABEL - NUMBER) / (max((one.score for one in best), default=0.0) or 1.0)
    parts = []
    for row, one in enumerate(best):
        y, colour = LINE * row, "#0072b2" if one.arm == position.choice else "#8fa9bd"
        q, bonus = (max(0.0, value * scale) for value in (one.q, one.bonus))
        label = one.arm if len(one.arm) <= LONGEST_LABEL else f"{one.arm[: LONGEST_LABEL - 1]}…"
        parts.append(
            f'<text x="{LABEL - 6}" y="{y + 14}" text-anchor="end">{escape(label)}</text>'
            f'<rect x="{LABEL}" y="{y + 3}" width="{q:.1f}" height="14" fill="{colour}"/>'
            f'<rect x="{LABEL + q:.1f}" y="{y + 3}" width="{bonus:.1f}" height="14" fill="#e69f00"/>'
            f'<text x="{LABEL + q + bonus + 5:.1f}" y="{y + 14}">{one.score:.4g}</text>'
        )
    title = "Score of each ad: expected revenue from here on (blue), bonus of exploration (orange)"
    return f'<p>{title}</p><svg viewBox="0 0 {WIDTH} {LINE * len(best)}"><title>{title}</title>{"".join(parts)}</svg>'
