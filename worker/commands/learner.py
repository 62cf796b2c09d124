"""The process that learns for a worker; `adcascade worker` starts it, with the options that it was given itself.

python -m worker.commands.learner --broker …
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import worker.cli  # noqa: F401 - says how many threads numpy may have, so before numpy is loaded
from worker.commands.worker import COMMAND, read
from worker.runners.kafka_learning import run_learner
from worker.settings import build_parser, resolve


def main(arguments: Sequence[str]) -> int:
    """Learn until the worker ends this."""
    options = resolve(build_parser(COMMAND, "adcascade worker").parse_args(arguments))
    told = read(options)
    return run_learner(told.link, told.names, learning=told.learning, dim=options.dim, arms=told.arms)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
