"""The settings of a worker and of its learner process, apart from Faust, which the learner process does not need."""

from __future__ import annotations

from dataclasses import dataclass

from worker.kafka.connection import Connection
from worker.secret import Secret
from worker.stream.decoding import Limits
from worker.stream.settings import Arm, LearningSettings
from worker.stream.topology import Topics


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """The settings of a worker; times are in seconds.

    `learning` has everything but the dimension; that is `dim`, or that of the published parameters. `learner` is the
    command line of the learner process (see `worker.kafka.learner`). `max_open_sessions` is by default what the memory
    holds. `clock_file` is for tests (see `clock_of`).
    """

    connection: Connection
    topics: Topics
    learner: tuple[str, ...]
    learning: LearningSettings
    dim: int | None = None
    arms: tuple[Arm, ...] = ()
    limits: Limits = Limits()  # noqa: RUF009 — it is frozen
    secret: Secret | None = None
    group: str = "adcascade"
    member_timeout: float = 10.0
    progress_interval: float = 1.0
    changelog_replication: int = 1
    max_open_sessions: int | None = None
    web_host: str = "127.0.0.1"
    web_port: int = 0
    clock_file: str | None = None
