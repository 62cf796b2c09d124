"""Options of a simulated world."""

from __future__ import annotations

from typing import Any

from worker.cli.options.learning import with_defaults
from worker.cli.options.parser import Option, count
from worker.simulation.environments import ENVIRONMENTS

SEED = count("seed", "random seed of the world and its users", 0, least=0)


def world(defaults: Any) -> tuple[Option, ...]:
    """Return the options of a world, with the defaults of a command."""
    return (
        Option("environment", "simulated world", choices=ENVIRONMENTS, default=defaults.environment),
        count("dim", "number d of context features", defaults.dim),
        count("arms", "number K of arms", defaults.arms),
        *with_defaults(defaults, "horizon", "repeats"),
    )
