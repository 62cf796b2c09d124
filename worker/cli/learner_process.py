"""The process that learns for a worker, who starts it with the options and variables that it has itself.

    python -m worker.cli.learner_process --broker …

It ends when its standard input does.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from worker.cli.options.parser import build_parser, resolve
from worker.cli.worker import COMMAND, read
from worker.errors import AdcascadeError
from worker.kafka.learning import run_learner

log = logging.getLogger(__name__)


def main(arguments: Sequence[str]) -> int:
    """Learn until the worker ends this."""
    try:
        options = resolve(build_parser(COMMAND, "adcascade worker").parse_args(arguments))
        told = read(options)
        return run_learner(told.link, told.names, learning=told.learning, dim=options.dim, arms=told.arms)
    except AdcascadeError as error:
        log.error("%s", error)  # the worker starts another one
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
