"""Options of a simulated world."""

from __future__ import annotations

from typing import Any

from worker.cli.options.learning import with_defaults
from worker.cli.options.parser import Option, count, number
from worker.simulation.environments import ENVIRONMENTS

SEED = count("seed", "random seed of the world and its users", 0, least=0)


def world(defaults: Any) -> tuple[Option, ...]:
    """Return the options of a world, with the defaults of a command."""
    return (
        Option("environment", "simulated world", choices=ENVIRONMENTS, default=defaults.environment),
        count("dim", "number d of context features", defaults.dim),
        count("arms", "number K of arms", defaults.arms),
        Option(
            "stay",
            "probability that a display is answered, times the rate of its arm",
            parse=number(above=0, most=1),
            default=defaults.stay,
        ),
        *with_defaults(defaults, "horizon", "repeats"),
    )
