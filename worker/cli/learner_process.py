"""The entry point of the learner process. The worker starts it with its own options and variables.

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
from worker.kafka.learner import run_learner

log = logging.getLogger(__name__)


def main(arguments: Sequence[str]) -> int:
    """Learn until the worker ends this process."""
    try:
        options = resolve(build_parser(COMMAND, "adcascade worker").parse_args(arguments))
        checked = read(options)
        return run_learner(
            checked.connection, checked.topics, learning=checked.learning, dim=checked.dim, arms=checked.arms
        )
    except AdcascadeError as error:
        log.error("%s", error)  # the worker starts it again
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
