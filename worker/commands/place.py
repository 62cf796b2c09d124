"""Where `parameters` and `arms` look: the options that say it, and what they lead to."""

from __future__ import annotations

import argparse

from worker.errors import InputError
from worker.runners.control import Control, StateControl
from worker.settings import Option

STATE = Option(name="state", help="the state folder of an embedded runner (`adcascade demo --state`)", metavar="DIR")

PLACE = (STATE,)


def control(options: argparse.Namespace) -> Control:
    """Return the place that the options name."""
    if options.state is None:
        raise InputError("--state DIR is missing: say where the parameters are kept")
    return StateControl(options.state)
