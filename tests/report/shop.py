"""A shop with named ads and users, whose log and state folder reports are made from."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from tests.serve.folder import FolderTap
from worker.embedded.runner import Embedded, Tap
from worker.logs.format import LogWriter
from worker.stream.events import Order
from worker.stream.features import Features
from worker.stream.settings import Arm, LearningSettings

HOUR = 3_600_000
DAY = 24 * HOUR
START = 1_767_225_600_000  # Thursday, 2026-01-01 00:00 UTC
FEATURES = Features.of_table(
    {"context": {"age": "number", "device": ["mobile", "desktop"], "member": "boolean", "city": {"hashed": 4}}}
)
ARMS = tuple(
    Arm(arm=name, reward=reward)
    for name, reward in (("shoes", 0.8), ("hat", 0.5), ("scarf", 0.3), ("tent", 4.0), ("coat", 1.5), ("socks", 0.05))
)
#: The log-odds of a click: base, per decade of age, on a mobile, for members.
TASTES = {
    "shoes": (-1.6, -0.4, 0.9, 0.0),
    "hat": (-1.8, 0.5, 0.0, 0.3),
    "scarf": (-1.2, 0.4, -0.8, 0.0),
    "tent": (-4.6, 0.0, -0.5, 1.0),
    "coat": (-2.4, 0.3, 0.2, 0.2),
    "socks": (-2.2, 0.0, 0.0, 0.0),
    "gl<o>ves": (-1.0, 0.2, 0.3, 0.4),
    "gloves": (-1.0, 0.2, 0.3, 0.4),
}


def settings(**changes: Any) -> LearningSettings:
    values = {"horizon": 3, "window": HOUR, "session_timeout": 10 * 60_000, "lateness": 60_000, **changes}
    return LearningSettings(dim=FEATURES.dim, features=FEATURES, **values)


def user(generator: np.random.Generator) -> dict[str, Any]:
    found: dict[str, Any] = {"age": round(float(np.clip(generator.normal(40, 14), 16, 90)))}
    found["device"] = ["mobile", "desktop", "watch"][int(generator.choice(3, p=[0.6, 0.35, 0.05]))]
    found["member"] = bool(generator.random() < 0.3)
    if generator.random() < 0.1:
        del found["age"]
    return found


def chance(arm: str, context: Mapping[str, Any], *, turned: bool) -> float:
    tastes = dict(zip(TASTES, reversed(TASTES.values()), strict=True)) if turned else TASTES
    base, age, mobile, member = tastes[arm]
    odds = base + age * (context.get("age", 40) - 40) / 10 + mobile * (context["device"] == "mobile")
    return float(1 / (1 + np.exp(-odds - member * context["member"])))


def run(
    log: Path,
    *,
    hours: int,
    per_hour: float = 20,
    orders: Mapping[int, Order] | None = None,
    silent: Mapping[str, int] | None = None,
    turn: int = 1 << 30,
    state: Path | None = None,
    seed: int = 0,
    **changes: Any,
) -> None:
    """Record some hours; `orders`, ads that fall `silent`, and the `turn` of the tastes come at an hour."""
    generator = np.random.default_rng(seed)
    with ExitStack() as stack:
        tap: Tap = stack.enter_context(LogWriter(log))
        if state is not None:
            tap = stack.enter_context(FolderTap(state, tap, keep=30 * DAY))
        shop = Embedded(settings(**changes), ARMS, partitions=2, tap=tap)
        for hour in range(hours):
            if orders and hour in orders:
                shop.order(orders[hour])
            rate = per_hour * (1 + 0.6 * np.sin(2 * np.pi * (hour - 9) / 24))
            serve(shop, generator, START + hour * HOUR, int(generator.poisson(rate)), hour, silent or {}, turn)
            shop.advance(START + (hour + 1) * HOUR)
        shop.advance(START + (hours + 2) * HOUR)
        shop.advance(START + (hours + 2) * HOUR + 1)


def serve(
    shop: Embedded,
    generator: np.random.Generator,
    begin: int,
    count: int,
    hour: int,
    silent: Mapping[str, int],
    turn: int,
) -> None:
    users = {}
    for at in np.sort(generator.integers(0, HOUR - 15 * 60_000, count)).tolist():
        name = f"s{len(users)}-{hour}"
        users[name] = begin + at, user(generator)
        value = orjson.dumps({"session_id": name, "occurred_at": begin + at, "context": users[name][1]})
        shop.send(shop.topics.arrivals, value, key=name.encode(), timestamp=begin + at)
    for _, value in shop.pump():
        decision = orjson.loads(value)
        name = decision["session_id"]
        at, context = users[name]
        for position, arm in enumerate(decision["slate"], start=1):
            clicked = bool(generator.random() < chance(arm, context, turned=hour >= turn))
            if hour >= silent.get(arm, 1 << 30) or (not clicked and generator.random() < 0.15):
                break
            body = {"session_id": name, "occurred_at": at + 20_000 * position, "position": position, "arm": arm}
            value = orjson.dumps({**body, "clicked": clicked})
            shop.send(shop.topics.clicks, value, key=name.encode(), timestamp=at + 20_000 * position)
            if clicked:
                break
    shop.pump()
