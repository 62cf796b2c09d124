"""The entry point of the process that runs the additive model beside a demo.

    python -m worker.cli.demo_beside SETTINGS

SETTINGS are `DemoSettings` as JSON. The process ends when its standard input does.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import msgspec

from worker.simulation.demo.beside import run_beside
from worker.simulation.demo.run import DemoSettings


def main(arguments: Sequence[str]) -> int:
    """Run until the end, or until the demo ends this process."""
    return run_beside(msgspec.json.decode(arguments[0], type=DemoSettings))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
