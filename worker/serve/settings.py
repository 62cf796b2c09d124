"""The settings of `adcascade serve`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from worker.errors import InputError
from worker.http.settings import HttpSettings
from worker.secret import Secret
from worker.stream.decoding import Limits
from worker.stream.parameters import Parameters
from worker.stream.settings import NO_CONTEXT, Arm, LearningSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """The settings of a server.

    `learning` has everything but the dimension: that is `dim`, or that of the folder. `learner` is the command line of
    the learner process. `keep` is how long the folder has the journal, `keep_record` parts of the log, in milliseconds.
    """

    folder: Path
    learning: LearningSettings
    learner: tuple[str, ...]
    http: HttpSettings
    clock: Callable[[], int]
    dim: int | None
    arms: tuple[Arm, ...]
    limits: Limits
    secret: Secret | None
    max_open_sessions: int | None
    record: Path | None
    keep: int
    keep_record: int
    progress_interval: float
    sync: bool


def dimension(dim: int | None, newest: Parameters | None) -> int:
    """Return the number of features: the given one, else that of the folder; raise `InputError` if they differ."""
    stored = None if newest is None else newest.settings.dim
    if dim is None and stored is None:
        raise InputError(f"the state folder is new, and {NO_CONTEXT}")
    if dim is not None and stored is not None and dim != stored:
        raise InputError(f"--dim is {dim}, but the state folder has {stored}: another size needs another folder")
    return dim or stored or 0
