"""How much to explore: the number of exploring users M_t and the confidence radius β_t of the theorems."""

from __future__ import annotations

import math

from worker.errors import InputError


def explore_budget(users: int, t: int, episodes: int) -> int:
    """Return M_t = max(1, ⌊N e^{−t / ln T}⌋), the users that AUCBBP lets explore in episode t of T.

    >>> [explore_budget(50, t, 300) for t in (0, 1, 5, 30)]
    [50, 41, 20, 1]
    """
    if episodes < 2:
        raise InputError(f"the number of episodes must be at least 2 (ln T divides), not {episodes}")
    return max(1, math.floor(users * math.exp(-t / math.log(episodes))))


def theory_radius(
    *, dim: int, arms: int, largest_reward: float, largest_norm: float, ridge: float, displays: int, delta: float = 0.05
) -> float:
    """Return β_t = κ e_max c_z sqrt(2(d+K) ln t̃ · ln((d+K)/δ)), κ = sqrt(3 + 2 ln(1 + c_z²/(8λ))).

    Valid and far too wide in practice: it explores for ever.

    >>> round(theory_radius(dim=5, arms=10, largest_reward=1.0, largest_norm=4.0, ridge=1.0, displays=1000), 1)
    313.5
    """
    size = dim + arms
    kappa = math.sqrt(3 + 2 * math.log(1 + largest_norm**2 / (8 * ridge)))
    spread = 2 * size * math.log(max(2, displays)) * math.log(size / delta)
    return kappa * largest_reward * largest_norm * math.sqrt(spread)
