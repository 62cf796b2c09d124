"""The status page: what a person wants to see of a running worker in ten seconds.

`status_routes` gives the page at `/`, its style and script, and `/status.json`, which the page asks for about once a
second. Everything comes from `Metrics.snapshot`: whoever feeds the metrics has the page for nothing, and the hot path
does no more than it does for them. An answer is kept for a moment: many who look cost no more than one.

The page loads nothing from anywhere else, and the headers forbid it to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from threading import Lock
from time import monotonic
from typing import Any, Final

import numpy as np
import orjson

from worker import __version__
from worker.bandit.model import sigmoid
from worker.errors import AdcascadeError
from worker.metrics import Metrics, Snapshot, Window, imbalances
from worker.metrics.catalogue import DURATIONS, LAGS
from worker.stream.parameters import Parameters
from worker.web.server import Page, Route

#: Seconds that an answer is good for.
FRESH: Final = 0.5
MOST_ARMS: Final = 12
CONFIDENCE: Final = 1.96  # standard deviations to each side of an estimate: 95 %
RECENT_WINDOWS: Final = 10

#: Above these, something is wrong enough to be said at the top of the page.
MOST_LAG: Final = 10_000
MOST_DEAD: Final = 0.01  # of the records read
STALE_WINDOWS: Final = 10  # windows that may pass without a new version

POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS: Final = (
    ("Content-Security-Policy", POLICY),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("X-Frame-Options", "DENY"),
)
FILES: Final = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/status.css": ("status.css", "text/css; charset=utf-8"),
    "/charts.js": ("charts.js", "text/javascript; charset=utf-8"),
    "/status.js": ("status.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}


def status_routes(
    metrics: Metrics,
    *,
    runner: str = "worker",
    unready: Callable[[], str | None] = lambda: None,
    clock: Callable[[], int] | None = None,
) -> dict[str, Route]:
    """Return the routes of the status page, to be joined with those of `operations`.

    Parameters
    ----------
    metrics : what the runner feeds
    runner : what is running, in a word
    unready : why no traffic should be sent here yet, or None; the same as for `operations`
    clock : the time in milliseconds that ages are told by; by default the stream's own time, the watermark

    Examples
    --------
    >>> sorted(status_routes(Metrics()))
    ['/', '/charts.js', '/icon.svg', '/status.css', '/status.js', '/status.json']
    """
    status = Status(metrics, runner=runner, unready=unready, clock=clock)

    def document(_: Mapping[str, str]) -> Page:
        return Page(body=status.json(), kind="application/json", headers=HEADERS)

    return {**{path: _file(*found) for path, found in FILES.items()}, "/status.json": document}


def _file(name: str, kind: str) -> Route:
    page = Page(body=(files("worker.web") / "page" / name).read_bytes(), kind=kind, headers=HEADERS)
    return lambda _: page


class Status:
    """Answers /status.json."""

    def __init__(
        self,
        metrics: Metrics,
        *,
        runner: str,
        unready: Callable[[], str | None],
        clock: Callable[[], int] | None,
    ) -> None:
        self._metrics, self._runner, self._unready, self._clock = metrics, runner, unready, clock
        self._began = monotonic()
        self._lock = Lock()
        self._answer, self._answered = b"", -math.inf
        self._arms: tuple[Parameters | None, list[dict[str, Any]]] = (None, [])

    def json(self) -> bytes:
        """Return the document, made anew if the last one is not fresh."""
        with self._lock:
            now = monotonic()
            if now - self._answered >= FRESH:
                # Non-finite numbers become null; the page shows a dash for them.
                self._answer, self._answered = orjson.dumps(self.document(now)), now
            return self._answer

    def document(self, now: float) -> dict[str, Any]:
        """Return everything the page shows."""
        snapshot, unready = self._metrics.snapshot(), self._unready()
        time = self._clock() if self._clock else snapshot.now.time
        tally = snapshot.now.tally
        return {
            "name": f"adcascade {__version__}",
            "runner": self._runner,
            "simulated": snapshot.simulated,
            "unready": unready,
            "time": time or None,
            "uptime": round(now - self._began, 3),
            "counters": {
                "arrivals": tally.arrivals,
                "feedback": tally.feedback,
                "decisions": tally.decisions.total(),
                "clicks": tally.clicks.total(),
                "dead": tally.dead.total(),
            },
            "problems": problems(snapshot, unready, time),
            "lately": lately(snapshot),
            "recent": recent(snapshot.windows[-RECENT_WINDOWS:]),
            "windows": columns(snapshot.windows),
            "positions": positions(snapshot),
            "parameters": _version(snapshot, time),
            "arms": self._top_arms(snapshot.parameters),
            "lag": snapshot.lag,
            "dead": {reason: count for reason, count in tally.dead.most_common() if count},
            "accounts": {**dict.fromkeys(imbalances(tally, 0, 0), 0.0), **snapshot.imbalance},
            "sessions": {
                "open": tally.opened + tally.recovered - tally.ended.total() - tally.handed_over,
                "opened": tally.opened,
                "ended": dict(tally.ended),
            },
            "learning": {
                "here": bool(snapshot.gauges.get("learning", 0.0)),
                "windows": int(snapshot.totals["episodes"]),
                "rejected": int(snapshot.totals["rejected"]),
                "refused": int(snapshot.totals["refused"]),
                "late": int(snapshot.totals["late"]),
            },
        }

    def _top_arms(self, parameters: Parameters | None) -> list[dict[str, Any]]:
        if self._arms[0] is not parameters:
            self._arms = (parameters, [] if parameters is None else top_arms(parameters))
        return self._arms[1]


# ── parts of the document ────────────────────────────────────────────────────────────────────────────────────────────


def top_arms(parameters: Parameters, most: int = MOST_ARMS) -> list[dict[str, Any]]:
    """Return the arms that earn most per display shown to a user with x = 0, with 95 % intervals.

    Retired arms come last, if there is room for them.
    """
    belief, rewards = parameters.posterior, parameters.rewards
    if not len(rewards):
        return []
    try:
        widths = belief.precision.widths(np.zeros((1, belief.dim)))[0]
    except AdcascadeError:
        return []
    odds = belief.theta_arms
    chance, low, high = (sigmoid(odds + side * CONFIDENCE * widths) for side in (0, -1, 1))
    active = np.array([arm.active for arm in parameters.arms])
    order = np.lexsort((-chance * rewards, ~active))[:most]
    return [
        {
            "arm": parameters.arms[place].arm,
            "reward": _short(rewards[place]),
            "active": parameters.arms[place].active,
            "probability": _short(chance[place]),
            "low": _short(low[place]),
            "high": _short(high[place]),
            "value": _short(chance[place] * rewards[place]),
        }
        for place in order.tolist()
    ]


def columns(windows: Sequence[Window]) -> dict[str, list[Any]]:
    """Return the windows column by column, which is a third of the size; regrets are per session."""
    return {
        "end": [window.end for window in windows],
        "sessions": [window.sessions for window in windows],
        "displays": [window.displays for window in windows],
        "clicks": [window.clicks for window in windows],
        "reward": [_short(window.reward) for window in windows],
        "expected": [_short(window.expected_reward) for window in windows],
        "explored": [_short(window.explored) for window in windows],
        "allowed": [_short(window.allowed) for window in windows],
        "bound": [_short(window.bound) for window in windows],
        "posterior": [_short(window.posterior) for window in windows],
        "pseudo": [_short(_pseudo_regret(window)) for window in windows],
        "oracle": [_short(window.oracle) for window in windows],
        "served": [_short(window.served) for window in windows],
    }


def recent(windows: Sequence[Window]) -> dict[str, Any]:
    """Return sums over the last windows, for the figures at the top; None where nothing is known."""
    sessions = sum(window.sessions for window in windows)
    truths = [window for window in windows if window.oracle is not None]
    allowed = [window.allowed for window in windows if window.allowed is not None]
    means = {}
    for name in ("bound", "posterior"):
        known = [(value, w.sessions) for w in windows if (value := getattr(w, name)) is not None]
        means[name] = _ratio(math.fsum(value * count for value, count in known), sum(count for _, count in known))
    oracle = math.fsum(window.oracle or 0.0 for window in truths)
    served = math.fsum(window.served or 0.0 for window in truths)
    return {
        "windows": len(windows),
        "sessions": sessions,
        "displays": sum(window.displays for window in windows),
        "clicks": sum(window.clicks for window in windows),
        "reward": math.fsum(window.reward for window in windows),
        "expected": math.fsum(window.expected_reward for window in windows),
        "explored": math.fsum(window.explored for window in windows),
        "allowed": math.fsum(allowed) if len(allowed) == len(windows) and windows else None,
        **means,
        "pseudo": _ratio(oracle - served, sum(window.sessions for window in truths)) if truths else None,
        "served_share": _ratio(served, oracle) if truths else None,
    }


def lately(snapshot: Snapshot) -> dict[str, Any]:
    """Return what happened since the oldest mark: how long ago that was, and how long decisions took."""
    since, now = snapshot.since, snapshot.now
    spent = _minus(now.durations, since.durations if since else None)
    waited = _minus(now.delays, since.delays if since else None)
    tally, before = now.tally, since.tally if since else None
    read = tally.arrivals + tally.feedback - (before.arrivals + before.feedback if before else 0)
    modes = dict(tally.decisions)
    for key, count in before.decisions.items() if before else ():
        modes[key] = modes.get(key, 0) - count
    by_mode: dict[str, int] = {}
    for (mode, _), count in modes.items():
        by_mode[mode] = by_mode.get(mode, 0) + count
    return {
        "span": now.time - since.time if since else None,
        "read": read,
        "dead": tally.dead.total() - (before.dead.total() if before else 0),
        "modes": by_mode,
        "duration_p50": quantile(DURATIONS, spent, 0.5),
        "duration_p99": quantile(DURATIONS, spent, 0.99),
        "delay_p50": quantile(LAGS, waited, 0.5),
        "delay_p99": quantile(LAGS, waited, 0.99),
    }


def positions(snapshot: Snapshot) -> list[dict[str, Any]]:
    """Return clicks by position lately, among the sessions that were not clicked at an earlier one.

    Users who left without a word are among them, so this is the click rate that the platform sees.
    """
    since, now = snapshot.since, snapshot.now
    clicks = dict(now.tally.clicks)
    sessions = now.tally.opened
    if since is not None and now.tally.opened > since.tally.opened:
        sessions -= since.tally.opened
        for position, count in since.tally.clicks.items():
            clicks[position] = clicks.get(position, 0) - count
    horizon = snapshot.parameters.settings.horizon if snapshot.parameters else 0
    rows = []
    for position in range(1, max([horizon, *clicks]) + 1 if clicks or horizon else 1):
        clicked = clicks.get(position, 0)
        rows.append({"position": position, "sessions": max(sessions, clicked), "clicks": clicked})
        sessions -= clicked
    return rows


def problems(snapshot: Snapshot, unready: str | None, time: int) -> list[dict[str, str]]:
    """Return what somebody should look at, in whole sentences; the worst first."""
    found: list[tuple[str, str]] = []
    if unready is not None:
        found.append(("bad", f"Not ready: {unready}."))
    broken = [f"{name} {value:+.0f}" for name, value in snapshot.imbalance.items() if value]
    if broken:
        found.append(("bad", f"The accounts do not balance ({', '.join(broken)}): this is a defect."))
    if refused := int(snapshot.totals["refused"]):
        found.append(("bad", f"{refused} version(s) refused: two learners disagree."))
    if snapshot.windows and snapshot.windows[-1].rejected:
        found.append(("bad", "The last window gave no usable estimate; the version before it serves."))
    behind = {topic: records for topic, records in snapshot.lag.items() if records > MOST_LAG}
    if behind:
        found.append(("warn", f"Behind: {', '.join(f'{n:,.0f} records of {t}' for t, n in behind.items())}."))
    part = lately(snapshot)
    if part["read"] and part["dead"] > MOST_DEAD * part["read"]:
        found.append(("warn", f"{part['dead'] / part['read']:.1%} of the records lately could not be used."))
    parameters = snapshot.parameters
    if parameters is None:
        found.append(("warn", "No parameters are known yet."))
    elif parameters.frozen:
        found.append(("warn", "Learning is frozen by command."))
    elif parameters.made_at and time - parameters.made_at > STALE_WINDOWS * parameters.settings.window:
        minutes = (time - parameters.made_at) / 60_000
        found.append(("warn", f"The parameters are {minutes:,.0f} minutes old: no window has taught anything since."))
    return [{"level": level, "text": text} for level, text in found]


def _version(snapshot: Snapshot, time: int) -> dict[str, Any] | None:
    parameters = snapshot.parameters
    if parameters is None:
        return None
    return {
        "version": parameters.version,
        "age": max(0, time - parameters.made_at) if parameters.made_at else None,
        "policy": parameters.settings.policy,
        "beta": _short(parameters.beta),
        "window": parameters.settings.window,
        "dim": parameters.settings.dim,
        "horizon": parameters.settings.horizon,
        "arms": len(parameters.arms),
        "active": sum(arm.active for arm in parameters.arms),
        "observations": parameters.observations,
        "budget": parameters.explore_budget if parameters.settings.policy == "aucbbp" else None,
        "frozen": parameters.frozen,
        "norm": _short(snapshot.gauges.get("parameter_norm")),
        "smallest_eigenvalue": _short(snapshot.gauges.get("smallest_eigenvalue")),
    }


def quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """Return the upper bound that a share of the observations lie at or below; None without any, or beyond the last.

    >>> quantile((0.1, 1.0), (98, 2, 0), 0.5), quantile((0.1, 1.0), (98, 2, 0), 0.99)
    (0.1, 1.0)
    """
    wanted, seen = share * sum(counts), 0
    for bound, count in zip(bounds, counts, strict=False):
        seen += count
        if seen and seen >= wanted:
            return float(bound)
    return None


def _minus(counts: Sequence[int], before: Sequence[int] | None) -> list[int]:
    """Return the difference; all of the counts if nothing has happened since."""
    since = [] if before is None else [now - then for now, then in zip(counts, before, strict=True)]
    return since if any(since) else list(counts)


def _pseudo_regret(window: Window) -> float | None:
    if window.oracle is None or window.served is None or not window.sessions:
        return None
    return (window.oracle - window.served) / window.sessions


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _short(number: float | None) -> float | None:
    """Return a number with as many digits as a picture needs."""
    return None if number is None else float(f"{number:.5g}")
