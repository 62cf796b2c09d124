"""Every error that adcascade raises on purpose.

::

    AdcascadeError
    ├── InputError            wrong options or files: one line, exit 2, nothing written
    │   ├── OtherFeaturesError    an ad has other features than those declared
    │   └── ParametersError   a parameters record is unreadable, inconsistent, or tampered with
    │       └── OldVersionError   it was made by an older release
    ├── FailedError           the work could not be done, or a check failed: exit 1
    └── EstimationError       a fold has no usable estimate; the learner keeps the old one

A message says what was wrong, where, and what to do about it.
"""


class AdcascadeError(Exception):
    """The root of adcascade's own errors."""


class InputError(AdcascadeError):
    """Options or files are wrong; nothing was done."""


class OtherFeaturesError(InputError):
    """An ad has other features than those declared, which matters only where no version has the ads."""


class ParametersError(InputError):
    """A parameters record cannot be used."""


class OldVersionError(ParametersError):
    """A parameters record was made by an older release, whose model is another."""


class FailedError(AdcascadeError):
    """The input was right, but the work could not be done or a check failed."""


class EstimationError(AdcascadeError):
    """The observations give no usable estimate; the previous one stays."""
