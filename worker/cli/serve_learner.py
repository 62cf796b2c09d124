"""The entry point of the learner process of `adcascade serve`, which starts it with its own options.

    python -m worker.cli.serve_learner --state DIR … LOCK

The last argument is the number of the open lock file. The process ends when its standard input does.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import replace

from worker.cli.options.parser import build_parser, resolve
from worker.cli.serve import COMMAND, read
from worker.embedded.state import StateView
from worker.errors import AdcascadeError
from worker.serve.learner import run_learner
from worker.serve.settings import dimension
from worker.stream.parameters import decode_parameters
from worker.stream.topology import Topics

log = logging.getLogger(__name__)


def main(arguments: Sequence[str]) -> int:
    """Learn until the serving process ends this one."""
    try:
        options = resolve(build_parser(COMMAND, "adcascade serve").parse_args(arguments[:-1]))
        checked = read(options)
        with StateView(checked.folder) as state:
            kept = state.parameters()
        newest = decode_parameters(kept[-1]) if kept else None
        return run_learner(
            str(checked.folder),
            int(arguments[-1]),
            topics=Topics(),
            learning=replace(checked.learning, dim=dimension(checked.dim, newest)),
            arms=checked.arms,
            record=checked.record,
        )
    except AdcascadeError as error:
        log.error("%s", error)  # it is started again
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
