"""Every error that adcascade raises on purpose.

::

    AdcascadeError
    ├── InputError            what the user gave is wrong: one line, exit 2, nothing written
    │   └── ParametersError   a parameters record is unreadable, inconsistent, or tampered with
    ├── FailedError           the work could not be done or a check did not hold: exit 1
    └── EstimationError       a fold gave no usable estimate; the learner keeps the old one

A message says what was wrong, where, and what to do about it.
"""


class AdcascadeError(Exception):
    """The root of adcascade's own errors."""


class InputError(AdcascadeError):
    """What the user gave is wrong; nothing was done."""


class ParametersError(InputError):
    """A parameters record cannot be used."""


class FailedError(AdcascadeError):
    """The input was fine, but the work could not be done or a check did not hold."""


class EstimationError(AdcascadeError):
    """No usable estimate came out of the observations; the previous one stands."""
