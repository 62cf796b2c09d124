"""The versions that the learner has kept in the state folder, as they come."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from worker.embedded.state import StateView
from worker.errors import AdcascadeError
from worker.metrics import Metrics
from worker.stream.parameters import Parameters, decode_parameters
from worker.stream.slates import SlatePlanner, prepared
from worker.stream.versions import Versions

log = logging.getLogger(__name__)


class StoredVersions:
    """Reads new versions from the folder, in a thread: a large one takes a while."""

    def __init__(self, folder: Path, versions: Versions, metrics: Metrics) -> None:
        self._folder = folder
        self._versions = versions
        self._metrics = metrics
        self._lock = asyncio.Lock()
        self._loading: set[asyncio.Task[None]] = set()
        self._stored = -1  # the highest version seen in the folder

    def load_soon(self, version: int) -> None:
        """Load what is new, up to this version."""
        if version > self._stored and not self._loading:
            task = asyncio.get_running_loop().create_task(self.load(version))
            self._loading.add(task)
            task.add_done_callback(self._loading.discard)

    async def load(self, version: int) -> None:
        """Load what is new, up to this version, and serve with it."""
        async with self._lock:
            if version <= self._stored:
                return
            for parameters, planner in await asyncio.to_thread(self._read, self._stored):
                self._take(parameters, planner)

    def _read(self, after: int) -> list[tuple[Parameters, SlatePlanner]]:
        with StateView(self._folder) as state:
            found = [decode_parameters(value) for value in state.parameters(after)]
        return [(parameters, prepared(parameters)) for parameters in found]

    def _take(self, parameters: Parameters, planner: SlatePlanner) -> None:
        self._stored = max(self._stored, parameters.version)
        try:
            is_new = self._versions.learn(parameters, planner)
        except AdcascadeError as error:
            self._metrics.refused()
            log.error("version %d is refused: %s", parameters.version, error)
            return
        self._metrics.version(self._versions.newest)
        if is_new:
            log.info("parameters version %d (%s…)", parameters.version, parameters.sha256[:12])
