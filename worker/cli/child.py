"""The entry point of the learner processes of `worker` and `serve`.

    python -m worker.cli.child worker|serve OPTIONS…

A learner has the options and variables of its parent. See `worker.runtime.child`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

from worker.cli.options.parser import build_parser
from worker.cli.options.places import resolve
from worker.runtime.child import run_child


def _learn_on_kafka(arguments: Sequence[str]) -> None:
    from worker.cli.worker import COMMAND, read
    from worker.kafka.learner import run_learner

    run_learner(read(resolve(build_parser(COMMAND, "adcascade worker").parse_args(arguments))))


def _learn_in_a_folder(arguments: Sequence[str]) -> None:
    from worker.cli.serve import COMMAND, read
    from worker.serve.learner import run_learner

    run_learner(read(resolve(build_parser(COMMAND, "adcascade serve").parse_args(arguments))))


WORK = {"worker": _learn_on_kafka, "serve": _learn_in_a_folder}


if __name__ == "__main__":
    sys.exit(run_child(partial(WORK[sys.argv[1]], sys.argv[2:])))
