"""Episode records for tests."""

from __future__ import annotations

from worker.stream.events import Episode

WINDOW = 60_000


def an_episode(number: int = 1, **changes: object) -> Episode:
    """Return the record of window `number`, counted from 1."""
    usual: dict[str, object] = {
        "version": number,
        "window_start": (number - 1) * WINDOW,
        "window_end": number * WINDOW,
        "sessions": 10,
        "displays": 20,
        "clicks": 3,
        "reward": 1.5,
        "expected_reward": 2.0,
        "explored": 2.5,
        "regret_bound": 0.3,
        "regret_posterior": 0.2,
        "frozen": False,
    }
    return Episode(**{**usual, **changes})  # type: ignore[arg-type]
