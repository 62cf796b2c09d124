"""Read the versions of the parameters and send orders to the learner."""

from __future__ import annotations

from typing import Protocol

from worker.embedded.runner import Embedded
from worker.embedded.state import StateFolder, StateView
from worker.errors import FailedError, InputError
from worker.stream.events import Order
from worker.stream.history import KeptVersion
from worker.stream.parameters import Parameters, decode_parameters


class LearnerControl(Protocol):
    """Access to the versions and the learner of a deployment."""

    def history(self) -> list[Parameters]:
        """Return the versions kept, oldest first."""

    def slots(self) -> dict[str, KeptVersion]:
        """Return the versions in the history, by slot."""

    def load(self, slot: str) -> Parameters | None:
        """Return the version in a slot of the history; None if there is none that can be used."""

    def order(self, event: Order) -> Parameters:
        """Execute an order and return the version after it; raise `FailedError` if the learner refuses it."""


class StateFolderControl:
    """Reads the versions of a state folder, also while it is used; gives orders to one that no process uses."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def history(self) -> list[Parameters]:
        """Return the versions kept, oldest first."""
        with StateView(self.folder) as state:
            versions = [decode_parameters(value) for value in state.parameters()]
        if not versions:
            raise InputError(f"{self.folder} holds no parameters yet")
        return versions

    def slots(self) -> dict[str, KeptVersion]:
        """Return the versions in the history, by slot."""
        with StateView(self.folder) as state:
            return state.slots()

    def load(self, slot: str) -> Parameters | None:
        """Return the version in a slot of the history."""
        with StateView(self.folder) as state:
            value = state.in_slot(slot)
        return None if value is None else decode_parameters(value)

    def order(self, event: Order) -> Parameters:
        """Append the order to the journal and execute it at once."""
        newest = self.history()[-1]
        with StateFolder(self.folder, create=False) as state:
            outcome = Embedded(newest.settings, newest.arms, state=state).order(event)
        for refusal in outcome.refusals:
            if refusal.order == event:
                raise FailedError(f"refused: {refusal.reason}")
        return self.history()[-1]
