"""The settings of `adcascade serve`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from worker.http.settings import HttpSettings
from worker.runtime.settings import ProcessSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings(ProcessSettings):
    """The settings of a server.

    `keep` is how long the folder has the journal, `keep_record` parts of the log, in milliseconds.
    """

    folder: Path
    http: HttpSettings
    record: Path | None
    keep: int
    keep_record: int
