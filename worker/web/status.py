"""The routes of the status page: the page at `/`, its style and scripts, and `/status.json`, which it polls.

Everything comes from `Metrics.snapshot`, so the page costs the hot path nothing. One answer serves all clients for
half a second. The page loads nothing from elsewhere, and its headers forbid that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from threading import Lock
from time import monotonic
from typing import Any, Final

import orjson

from worker import __version__
from worker.http.pages import BROWSER_HEADERS, Page, Route, page_of_file
from worker.metrics.history import Snapshot
from worker.metrics.observer import Metrics
from worker.stream.ad_figures import best_and_worst
from worker.web.figures import (
    calibration,
    columns,
    lately,
    lift,
    positions,
    recent,
    top_arms,
    version,
)

FRESH: Final = 0.5  # seconds for which an answer is reused
RECENT_WINDOWS: Final = 10
MOST_ADS: Final = 10  # ads with the highest revenue, and others, whose figures are shown
MOST_LAG: Final = 10_000  # records of one topic that may be unread

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
    """Return the routes of the status page, to be merged with those of `operations`.

    `runner` is the name of the running command. `unready` returns the reason why the process is not ready, or None.
    `clock` returns milliseconds, for ages; by default they count from the watermark.

    >>> sorted(status_routes(Metrics()))
    ['/', '/charts.js', '/icon.svg', '/status.css', '/status.js', '/status.json']
    """
    started, lock = monotonic(), Lock()
    answer, answered = b"", -math.inf

    def status(_: Mapping[str, str]) -> Page:
        nonlocal answer, answered
        with lock:
            now = monotonic()
            if now - answered >= FRESH:
                snapshot = metrics.snapshot()
                time = clock() if clock else snapshot.now.time
                known = document(snapshot, time, unready()) | {"runner": runner, "uptime": round(now - started, 3)}
                answer, answered = orjson.dumps(known), now
            return Page(body=answer, kind="application/json", headers=BROWSER_HEADERS)

    return {**{path: page_of_file("worker.web", *found) for path, found in FILES.items()}, "/status.json": status}


def document(snapshot: Snapshot, time: int, unready: str | None) -> dict[str, Any]:
    """Return what the page shows at a time; orjson turns non-finite numbers into null."""
    tally, numbers, parameters, users = snapshot.now.tally, snapshot.numbers, snapshot.parameters, snapshot.contexts
    figures = {
        "lately": lately(snapshot),
        "recent": recent(snapshot.windows[-RECENT_WINDOWS:]),
        "windows": columns(snapshot.windows),
        "positions": positions(snapshot),
        "parameters": version(snapshot, time),
        "lift": lift(parameters),
        "arms": [] if parameters is None else top_arms(parameters, users),
        "calibration": calibration(snapshot),
        "users": len(users),
    }
    return {
        "name": f"adcascade {__version__}",
        "simulated": "pseudo_regret" in numbers,
        "time": time or None,
        "counters": {"arrivals": tally.arrivals, "feedback": tally.feedback, "decisions": tally.decisions.total()},
        "problems": problems(snapshot, unready),
        "lag": snapshot.lag,
        "dead": {reason: count for reason, count in tally.dead.most_common() if count},
        "balances": snapshot.imbalance,
        "sessions": {"open": tally.open_sessions},
        "learning": {
            "here": bool(numbers.get("learning", 0.0)),
            "windows": int(numbers["episodes_closed"]),
            "rejected": int(numbers["rejected_folds"]),
            "late": int(numbers["late_records"]),
            "late_feedback": tally.late + tally.outside,
            "unknown_feedback": tally.unknown,
        },
        "unlisted": [
            {"feature": name, "count": count, "values": tally.unlisted.frequent(name)}
            for name, count in tally.unlisted.features.most_common()
        ],
        "ads": None if parameters is None else best_and_worst(parameters, MOST_ADS),
        **short(figures),
    }


def short(value: Any) -> Any:
    """Return a document whose numbers have the digits that a chart can show.

    >>> short({"rate": 1 / 3, "times": [1_700_000_000_000, 12345.678]})
    {'rate': 0.33333, 'times': [1700000000000, 12346.0]}
    """
    match value:
        case float():
            return float(f"{value:.5g}")
        case dict():
            return {name: short(inner) for name, inner in value.items()}
        case list() | tuple():
            return [short(inner) for inner in value]
    return value


# ── problems ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def problems(snapshot: Snapshot, unready: str | None) -> list[dict[str, str]]:
    """Return what is wrong, in sentences, the worst first; troubles also have `kind`, `detail` and `do`."""
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
        yield f"The balances are off ({', '.join(broken)}). This is a defect of the worker."
    if refused := int(snapshot.numbers["refused_versions"]):
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
