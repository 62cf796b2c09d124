"""The entry point of the learner processes of `worker` and `serve`.

    python -m worker.cli.child worker|serve OPTIONS…

A learner has the options and variables of its parent. See `worker.runtime.process`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module

from worker.cli.main import load
from worker.cli.options.parser import build_parser
from worker.cli.options.places import resolve
from worker.runtime.process import run_child

#: The learner of a command, by its name.
LEARNERS = {"worker": "worker.kafka.learner", "serve": "worker.serve.learner"}


def learn(name: str, arguments: Sequence[str]) -> None:
    """Run the learner of a command with the command's options."""
    options = resolve(build_parser(load(name), f"adcascade {name}").parse_args(arguments))
    import_module(LEARNERS[name]).run_learner(import_module(f"worker.cli.{name}").read(options))


if __name__ == "__main__":
    sys.exit(run_child(partial(learn, sys.argv[1], sys.argv[2:])))
