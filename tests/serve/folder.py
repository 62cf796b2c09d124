"""State folders without a server: written by an embedded runner, or by batches, and taking orders as a server does."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from tests.stream.scenes import feedback, opened, progress
from worker.embedded.runner import Headers, Tap
from worker.runtime.learner_process import LearnerStatus
from worker.runtime.settings import ProcessSettings
from worker.serve.control import OrderDesk
from worker.serve.learner import JournalFolder
from worker.serve.server import decoded_lesson
from worker.serve.state import StateFolder, StateView
from worker.serve.store import ServeStore, keep_first
from worker.stream.events import Order, encode_event
from worker.stream.parameters import Parameters, decode_parameters
from worker.stream.settings import Arm, LearningSettings
from worker.stream.topology import Emits, Record
from worker.stream.versions import KEPT

START = 1_700_000_000_000
ARMS = [Arm(arm="hat", reward=1.0)]  # one, so that every slate is known
LEARNING = LearningSettings(dim=1, horizon=1, warmup=1, window=1_000, session_timeout=1_000, lateness=100)


class FolderTap:
    """A tap that keeps journal and versions of an embedded runner in a state folder; `other` is a second tap."""

    def __init__(self, folder: Path, other: Tap | None = None, *, keep: int = 0) -> None:
        self.state = StateFolder(folder, keep=keep)
        self._other = other
        self._versions: list[Parameters] = []

    def __call__(self, record: Record, headers: Headers = ()) -> None:
        if self._other is not None:
            self._other(record, headers)
        kind = record.topic.partition(".")[2]
        if kind == "journal":
            self.state.append_journal([(record.offset, record.value or b"")])
        elif kind == "parameters":
            version = decode_parameters(record.value or b"")
            self._versions.append(version)
            self.state.put_parameters(version, record.value or b"", kept=KEPT)
            self.state.keep_history(self._versions[-KEPT:])

    def __enter__(self) -> FolderTap:
        return self

    def __exit__(self, *exc: object) -> None:
        self.state.commit()
        self.state.close()


class Served:
    """A server without requests: batches go into its folder, and a learner folds them."""

    def __init__(
        self,
        folder: Path,
        record: Path | None = None,
        *,
        keep: int = 0,
        keep_record: int = 0,
        learning: LearningSettings = LEARNING,
    ) -> None:
        self.state = StateFolder(folder, keep=keep)
        try:
            if not self.state.parameters():
                keep_first(self.state, Parameters.first(learning, ARMS))
            self.store = ServeStore(self.state, record, keep=keep_record)
        except BaseException:
            self.state.close()
            raise
        self.learner = JournalFolder(self.state, ProcessSettings(learner=(), learning=learning, arms=ARMS))

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *exc: object) -> None:
        self.store.close()
        self.state.close()

    def serve(self, number: int, *, synchronise: bool = False) -> None:
        """Keep a session that is opened, shown one ad, and clicked, and progress to the end of its window."""
        name, at = f"s{number}", START + 7_000 * number
        facts = (
            opened(name, at, ("hat",), context=(0.5,), modes=("warmup",)),
            feedback(1, "hat", True, at + 1, name),
        )
        self.store.time = at + 5_000
        journal: list[tuple[bytes | None, bytes]] = [
            *((name.encode(), encode_event(fact)) for fact in facts),
            (None, encode_event(progress(at + 5_000))),
        ]
        offset = self.store.next_offset("ads.clicks")
        records = [Record("ads.clicks", 0, offset, at, name.encode(), b"{}")]
        self.store.add_batch(records, Emits(changelog=[(name.encode(), b"value")], journal=journal))
        self.store.prepare()
        self.store.commit(synchronise=synchronise)

    def order(self, *orders: Order) -> None:
        self.store.add_journal([(None, encode_event(order)) for order in orders])
        self.store.prepare()
        self.store.commit(synchronise=False)

    def learn(self) -> tuple[LearnerStatus, list[tuple[int, str]]]:
        """Fold what is new, and keep the lesson; return the report, and all orders refused."""
        status = self.learner.fold()
        assert status is not None
        known = [decode_parameters(value) for value in self.state.parameters()]
        refused = self.store.add_lesson(decoded_lesson(status), known)
        self.store.prepare()
        self.store.commit(synchronise=False)
        return status, [*status.refused, *refused]

    @property
    def versions(self) -> list[int]:
        return [json.loads(value)["version"] for value in self.state.parameters()]


class _Orders:
    """The part of a server that a desk needs."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self.desk = OrderDesk(cast("Any", self))

    async def order(self, order: Order) -> int:
        self._served.order(order)
        status, refused = self._served.learn()
        self.desk.report(status.position, refused)
        return status.position - 1

    @property
    def versions(self) -> Any:
        return SimpleNamespace(newest=decode_parameters(self._served.state.parameters()[-1]))


@contextmanager
def taking_orders(folder: Path) -> Iterator[None]:
    """Take orders for a folder in a thread."""
    with StateView(folder) as state:
        settings = decode_parameters(state.parameters()[-1]).settings
    ready, loop, stop = threading.Event(), asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        with Served(folder, learning=settings) as served:
            async with await _Orders(served).desk.listen(folder):
                ready.set()
                await stop.wait()

    def run() -> None:
        loop.run_until_complete(serve())
        loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(60)
    try:
        yield
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
