"""The versions process and its supervisor: what is handed over, when the worker is ready, and what a kill does."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.embedded.traffic import ARMS, settings
from tests.transport.fake import in_loop
from worker.kafka.parameters import PublishedParameters, UnfitError
from worker.kafka.supervision import Pauses, end_process
from worker.kafka.versions_process import VersionsProcess
from worker.metrics import Metrics
from worker.stream.events import Arrival
from worker.stream.parameters import Parameters
from worker.stream.settings import Arm
from worker.stream.slates import SlatePlanner
from worker.stream.version_encoding import encode_parameters
from worker.stream.versions import KEPT

ZERO = Parameters.first(settings(), ARMS)
CHILD = (sys.executable, "-m", "tests.transport.versions_child")


def version(number: int, **changes: Any) -> Parameters:
    return replace(ZERO, version=number, journal_offset=number, **changes)


def other(parameters: Parameters) -> Parameters:
    return replace(parameters, arms=(*parameters.arms[:-1], Arm(arm="other", reward=1.0)))


async def until(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 30
    while not (found := condition()):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    return found


class Quick(VersionsProcess):
    """A versions process that is started again soon."""

    pauses = Pauses(first=0.02, most=0.1)


class Topic:
    """A topic in a folder, and the worker's side of the process that reads it."""

    def __init__(self, folder: Path, history: tuple[Parameters, ...] = (), command: tuple[str, ...] = CHILD) -> None:
        gc.collect()  # what the test before this one has mapped
        self.folder = folder
        self.metrics = Metrics()
        self.published = PublishedParameters(ZERO, history, self.metrics)
        self.seen: list[int] = []
        self.published.watch(lambda parameters: self.seen.append(parameters.version))
        self.process = Quick((*command, str(folder)), self.published, self.metrics.troubles)

    def write(self, *values: Parameters | bytes) -> None:
        for value in values:
            end = sum(path.name.isdecimal() for path in self.folder.iterdir())
            partial = self.folder / "partial"
            partial.write_bytes(value if isinstance(value, bytes) else encode_parameters(value))
            partial.rename(self.folder / str(end))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[asyncio.Task[None]]:
        task = asyncio.ensure_future(self.process.run())
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.wait([task])

    @property
    def prepared(self) -> list[int]:
        notes = self.folder / "prepared"
        return [int(number) for number in notes.read_text(encoding="ascii").split()] if notes.exists() else []

    @property
    def child(self) -> int | None:
        pid = os.getpid()
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split():
            if str(self.folder).encode() in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
        return None

    @property
    def trouble(self) -> str:
        """The example of `versions-down`, empty while it is not active."""
        self.process.check()
        return next((one.example for one in self.metrics.troubles.active() if one.name == "versions-down"), "")

    def counted(self, name: str) -> float:
        return self.metrics.registry.get_sample_value(f"adcascade_{name}") or 0.0


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def mapped() -> int:
    """Return how many versions are mapped into this process."""
    return Path("/proc/self/maps").read_text(encoding="utf-8").count("adcascade-version")


@in_loop
async def test_versions_are_handed_over_prepared_and_serve_as_if_they_were_prepared_here(tmp_path: Path) -> None:
    topic = Topic(tmp_path)
    topic.write(ZERO, version(1, effective_at=1_000))
    async with topic.running():
        await until(lambda: topic.published.version == 1)
    assert topic.seen == [0, 1]
    assert [one.sha256 for one in topic.published.history] == [ZERO.sha256, version(1).sha256]
    planner = topic.published.versions.at(10**15)
    assert {"_planner", "_policy"} <= vars(planner).keys(), "the first plan has nothing left to prepare"
    arrivals = [Arrival(session_id=f"s-{n}", occurred_at=0, context=()) for n in range(9)]
    contexts = [bytes(8 * ZERO.settings.dim)] * 9
    assert planner.plan(arrivals, contexts) == SlatePlanner(version(1)).plan(arrivals, contexts)
    assert mapped() == 2


@in_loop
async def test_the_worker_is_ready_when_all_versions_before_the_end_at_the_last_catch_up_were_taken(tmp_path) -> None:
    topic = Topic(tmp_path)
    async with topic.running():
        await until(lambda: topic.process._end[0] == 0)
        assert not topic.process.ready, "there is no version"
        topic.write(ZERO)
        await until(lambda: topic.process.ready)
        topic.write(*(version(number) for number in range(1, 6)))
        topic.process.catch_up()
        assert not topic.process.ready
        await until(lambda: topic.process.ready)
        assert topic.published.version == 5


@in_loop
async def test_records_that_cannot_be_read_or_contradict_are_refused(tmp_path: Path, caplog: Any) -> None:
    topic = Topic(tmp_path, history=(ZERO,))
    rounded = version(1, radius=version(1).radius + 1e-12)
    topic.write(ZERO, b"{", version(1), other(version(1)), rounded, version(2))
    async with topic.running():
        await until(lambda: topic.process.ready)
    assert topic.published.version == 2
    assert topic.counted("refused_versions_total") == 2
    assert topic.counted("rounded_versions_total") == 1
    assert "parameters at offset 1 are refused: not JSON" in caplog.text
    assert "parameters at offset 3 are refused" in caplog.text
    assert "two learners disagree" in caplog.text
    assert [one.sha256 for one in topic.published.history] == [one.sha256 for one in (ZERO, version(1), version(2))]
    assert topic.prepared == [1, 2], "what is known or contradicts is not prepared"


@in_loop
async def test_a_known_version_counts_from_the_newest_position_and_keeps_its_memory(tmp_path: Path) -> None:
    topic = Topic(tmp_path)
    topic.write(version(3), version(3, effective_at=7, progress={0: 4}), replace(version(3), journal_offset=99))
    async with topic.running():
        await until(lambda: topic.process.ready)
    (kept,) = topic.published.history
    assert (kept.journal_offset, kept.sha256) == (99, version(3).sha256)
    assert mapped() == 1


@in_loop
async def test_a_first_version_of_another_size_ends_the_worker_with_its_line(tmp_path: Path) -> None:
    topic = Topic(tmp_path)
    topic.write(Parameters.first(replace(ZERO.settings, dim=ZERO.settings.dim + 1), ZERO.arms))
    async with topic.running() as task:
        with pytest.raises(UnfitError, match=r"another worker has published version 0: --dim is \d"):
            await asyncio.wait_for(task, 30)


@in_loop
async def test_a_killed_process_is_started_again_and_prepares_nothing_twice(tmp_path: Path) -> None:
    topic = Topic(tmp_path)
    topic.write(ZERO, version(1))
    async with topic.running():
        await until(lambda: topic.process.ready)
        killed = topic.child
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        await until(lambda: "ended with code -9" in topic.trouble)
        assert topic.published.version == 1, "the versions that are known serve on"
        topic.write(version(2))
        await until(lambda: topic.published.version == 2)
        assert topic.child not in (None, killed)
        assert topic.trouble == ""
        topic.process.catch_up()
        await until(lambda: topic.process.ready)
    assert topic.prepared == [0, 1, 2]
    assert topic.seen == [0, 1, 2]
    assert topic.child is None, "no process is left"


@in_loop
async def test_a_process_that_dies_whenever_it_hands_over_is_reported_and_serving_goes_on(tmp_path: Path) -> None:
    topic = Topic(tmp_path, history=(ZERO,))
    (tmp_path / "full").touch()
    topic.write(version(1))
    async with topic.running():
        await until(lambda: topic.trouble)
        assert topic.trouble == "version 1 cannot be handed to the worker: [Errno 28] No space left on device"
        assert topic.published.version == 0
        (tmp_path / "full").unlink()
        await until(lambda: topic.published.version == 1)
        assert topic.trouble == ""


@in_loop
async def test_the_memory_of_a_version_is_returned_after_eight_newer_ones(tmp_path: Path) -> None:
    topic = Topic(tmp_path)
    files = open_files()
    topic.write(*(version(number) for number in range(3 * KEPT)))
    async with topic.running():
        await until(lambda: topic.process.ready)
    assert topic.published.version == 3 * KEPT - 1
    assert mapped() == KEPT
    assert open_files() <= files + KEPT


@pytest.mark.parametrize(
    ("child", "reason"),
    [
        ("import sys; sys.exit(3)", "the versions process ended with code 3"),
        ("import os; os.write(0, b'{\\n'); input()", "wrote what cannot be read"),
        ('import os; os.write(0, b\'{"failure":"as a test"}\\n\'); input()', "as a test"),
        ('import os; os.write(0, b\'{"offset":0,"parts":[["record","|u1",[0],0]]}\\n\'); input()', "without its file"),
    ],
    ids=["exit", "garbage", "failure", "no file"],
)
@in_loop
async def test_however_the_process_ends_it_is_started_again(tmp_path: Path, child: str, reason: str) -> None:
    topic = Topic(tmp_path, history=(ZERO,), command=(sys.executable, "-c", child))
    async with topic.running() as task:
        await until(lambda: reason in topic.trouble)
        assert not task.done()
        assert not topic.process.ready


def test_a_process_that_says_nothing_counts_as_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = Topic(tmp_path)
    assert topic.trouble == "", "it was not started yet"
    topic.process._heard = time.monotonic() - 61
    assert topic.trouble == "the versions process has reported nothing for 61 s"


def test_the_process_ends_with_its_worker(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        child = subprocess.Popen((*CHILD, str(tmp_path)), stdin=theirs)
    ours.send(b'{"known":{}}\n{"asked":1}\n')
    assert ours.recv(1 << 10), "it runs"
    ours.close()
    assert child.wait(30) == 0


@in_loop
async def test_a_process_is_waited_for_although_its_end_is_cancelled() -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "import time; time.sleep(60)")
    ending = asyncio.get_running_loop().create_task(end_process(process))
    await asyncio.sleep(0)
    ending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ending
    assert process.returncode == -signal.SIGKILL
