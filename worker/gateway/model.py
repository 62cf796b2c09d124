"""What a gateway must know of the published parameters: how records are judged, and the fallback ads."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from worker.kafka.parameters import Received
from worker.stream.feature_changes import encoder_of
from worker.stream.features import ContextEncoder
from worker.stream.parameters import Parameters
from worker.stream.slates import SlatePlanner


class PublishedModel:
    """The newest version of the parameters topic; `planner` is None until one is read.

    `on_newest` is called with every newer version.
    """

    def __init__(self, on_newest: Callable[[Parameters], None]) -> None:
        self._on_newest = on_newest
        self.planner: SlatePlanner | None = None
        #: Encodes named contexts; the names before the last change of features are understood as well.
        self.encoder: ContextEncoder | None = None

    @property
    def version(self) -> int:
        """The newest version, -1 before the first."""
        return -1 if self.planner is None else self.planner.parameters.version

    def take(self, records: Iterable[Received]) -> None:
        """Take records of the topic; those that cannot be read are for the workers to report."""
        for record in records:
            if record.parameters is not None:
                self.adopt(record.parameters)

    def adopt(self, parameters: Parameters) -> None:
        """Use a version if it is newer than the present one, or the same from a newer position, with its accounts."""
        known = None if self.planner is None else self.planner.parameters
        if known is None or parameters.version > known.version:
            self.planner, self.encoder = SlatePlanner(parameters), encoder_of(parameters, [parameters])
            self._on_newest(parameters)
        elif self.planner and parameters.sha256 == known.sha256 and parameters.journal_offset > known.journal_offset:
            self.planner.parameters = parameters
