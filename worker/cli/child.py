"""The entry point of the child processes: the learners of `worker` and `serve`, and the run beside a demo.

    python -m worker.cli.child worker|serve OPTIONS…
    python -m worker.cli.child beside SETTINGS

A learner has the options and variables of its parent; SETTINGS are `DemoSettings` as JSON. See `worker.runtime.child`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from functools import partial

import msgspec

from worker.cli.options.parser import build_parser, resolve
from worker.runtime.child import run_child


def _learn_on_kafka(arguments: Sequence[str]) -> None:
    from worker.cli.worker import COMMAND, read
    from worker.kafka.learner import run_learner

    checked = read(resolve(build_parser(COMMAND, "adcascade worker").parse_args(arguments)))
    run_learner(checked.connection, checked.topics, learning=checked.learning, dim=checked.dim, arms=checked.arms)


def _learn_in_a_folder(arguments: Sequence[str]) -> None:
    from worker.cli.serve import COMMAND, read
    from worker.serve.learner import run_learner

    checked = read(resolve(build_parser(COMMAND, "adcascade serve").parse_args(arguments)))
    run_learner(checked.folder, learning=checked.learning, arms=checked.arms)


def _run_beside(arguments: Sequence[str]) -> None:
    from worker.simulation.demo.beside import run_beside
    from worker.simulation.demo.run import DemoSettings

    logging.disable()  # the demo shows the failure, in one line
    run_beside(msgspec.json.decode(arguments[0], type=DemoSettings))


WORK = {"worker": _learn_on_kafka, "serve": _learn_in_a_folder, "beside": _run_beside}


if __name__ == "__main__":
    sys.exit(run_child(partial(WORK[sys.argv[1]], sys.argv[2:])))
