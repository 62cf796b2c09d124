"""The settings of `adcascade serve`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from worker.errors import InputError
from worker.http.settings import HttpSettings
from worker.secret import Secret
from worker.stream.decoding import Limits
from worker.stream.parameters import Parameters
from worker.stream.settings import NO_CONTEXT, Arm, LearningSettings, continued
from worker.stream.starting import Start


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
    start: Start | None
    limits: Limits
    secret: Secret | None
    max_open_sessions: int | None
    record: Path | None
    keep: int
    keep_record: int
    progress_interval: float
    sync: bool


def continued_learning(settings: ServeSettings, newest: Parameters | None) -> LearningSettings:
    """Return the settings of learning, for the model of the folder if there is one; raise `InputError` if they differ.

    Declared features may differ: those of the folder hold.
    """
    if newest is not None:
        dim = settings.dim or newest.settings.dim
        return continued(replace(settings.learning, dim=dim), newest.settings)
    if settings.dim is None:
        raise InputError(f"the state folder is new, and {NO_CONTEXT}")
    return replace(settings.learning, dim=settings.dim)
