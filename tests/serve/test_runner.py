"""The serving process without HTTP: batches, repeated requests, deadlines, a disk that fails."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from worker.errors import FailedError
from worker.http.api import read_arrive, read_feedback
from worker.http.service import AdRequest, Answer, UnavailableError, UnknownSessionError
from worker.metrics.observer import Metrics
from worker.runtime.settings import ProcessSettings
from worker.secret import Secret
from worker.serve.runner import ServeRunner
from worker.serve.state import StateFolder, StateView
from worker.serve.store import ServeStore
from worker.stream.decoding import Rejected
from worker.stream.parameters import Parameters
from worker.stream.settings import Arm, LearningSettings
from worker.stream.versions import Versions

START = 1_700_000_000_000
ARMS = [Arm(arm=name, reward=reward) for name, reward in (("hat", 1.0), ("coat", 3.0), ("shoe", 2.0))]
LEARNING = LearningSettings(dim=2, horizon=3, repeats=False, warmup=0, session_timeout=60_000)


def arrival(session_id: str, context: Sequence[float] = (1, 2), **more: Any) -> AdRequest:
    return read_arrive(json.dumps({"session_id": session_id, "context": context, **more}).encode())


def answer_of(session_id: str, **fields: Any) -> AdRequest:
    return read_feedback(json.dumps(fields).encode(), session_id)


class CountingFolder(StateFolder):
    """A state folder that counts its commits; with `is_full`, none succeeds."""

    commits, is_full = 0, False

    def commit(self) -> None:
        if self.is_full:
            raise sqlite3.OperationalError("database or disk is full")
        super().commit()
        self.commits += 1


class Scene:
    """A runner with a clock that the test sets."""

    def __init__(self, state: CountingFolder, **more: Any) -> None:
        self.now = START
        self.versions = Versions(Parameters.first(LEARNING, ARMS))
        self.metrics = Metrics()
        self.state = state
        settings = ProcessSettings(
            learner=(), learning=LEARNING, clock=lambda: self.now, progress_interval=3600.0, **more
        )
        self.runner = ServeRunner(ServeStore(state), self.versions, self.metrics, settings)

    def later(self, seconds: float = 10.0) -> float:
        return asyncio.get_running_loop().time() + seconds

    async def arrive(self, *given: Any, **more: Any) -> Any:
        return document(await self.runner.arrive(arrival(*given, **more), self.later()))

    async def report(self, decision: Any, clicked: bool) -> Any:
        token = {"token": decision["tokens"][0]} if "tokens" in decision else {}
        shown = {"position": decision["position"], "arm": decision["arm"]}
        request = answer_of(decision["session_id"], **shown, clicked=clicked, **token)
        return document(await self.runner.feedback(request, self.later()))

    def facts(self, kind: str = "") -> list[Any]:
        """Return what the journal has on disk: facts of a kind, or all but progress."""
        with StateView(self.state.path) as state:
            facts = [json.loads(value) for _, value in state.journal(0)]
        return [fact for fact in facts if (fact["kind"] == kind if kind else fact["kind"] != "progress")]


def document(answer: Answer | None) -> Any:
    assert answer is not None
    return json.loads(answer.body())


@asynccontextmanager
async def playing(folder: Path, **more: Any) -> AsyncIterator[Scene]:
    """Run a fresh runner meanwhile."""
    with CountingFolder(folder) as state:
        scene = Scene(state, **more)
        running = asyncio.create_task(scene.runner.run())
        try:
            yield scene
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def test_a_session_goes_through_its_slate_until_it_is_exhausted(tmp_path: Path) -> None:
    async with playing(tmp_path) as scene:
        decision = await scene.arrive("s")
        slate = decision["slate"]
        for position, arm in enumerate(slate, start=1):
            assert (decision["position"], decision["arm"]) == (position, arm)
            decision = await scene.report(decision, clicked=False)
        assert decision == {"session_id": "s", "ended": "exhausted"}
    assert [fact["kind"] for fact in scene.facts()] == ["opened", "feedback", "feedback", "feedback"]


async def test_an_arrival_that_comes_again_has_the_same_answer(tmp_path: Path) -> None:
    async with playing(tmp_path) as scene:
        first = await scene.arrive("s")
        scene.now += 5_000
        assert await scene.arrive("s") == first
        together = await asyncio.gather(*(scene.arrive("t") for _ in range(5)))
        assert all(one == together[0] for one in together)
        with pytest.raises(Rejected, match="session-reused"):
            await scene.arrive("s", [2, 1])
        after = await scene.report(first, clicked=False)
        assert await scene.arrive("s") == after


async def test_feedback_that_comes_again_counts_once(tmp_path: Path) -> None:
    async with playing(tmp_path) as scene:
        decision = await scene.arrive("s")
        assert await scene.report(decision, clicked=True) == {"session_id": "s", "ended": "clicked"}
        assert await scene.report(decision, clicked=True) == {"session_id": "s", "ended": "clicked"}
        assert scene.metrics.snapshot().now.tally.clicks.total() == 1


async def test_many_requests_are_one_transaction(tmp_path: Path) -> None:
    async with playing(tmp_path) as scene:
        before = scene.state.commits
        await asyncio.gather(*(scene.arrive(f"s{number}") for number in range(50)))
        assert scene.state.commits <= before + 2


async def test_mistakes_have_the_reasons_of_dead_letters(tmp_path: Path) -> None:
    async with playing(tmp_path) as scene:
        decision = await scene.arrive("s")
        for wrong, reason in (
            ({"arm": "nothing"}, "unknown-arm"),
            ({"arm": decision["slate"][1]}, "arm-mismatch"),
            ({"position": 7}, "position"),
        ):
            with pytest.raises(Rejected) as caught:
                await scene.report({**decision, **wrong}, clicked=True)
            assert caught.value.reason == reason
        with pytest.raises(Rejected, match="dimension"):
            await scene.arrive("t", [1])
        with pytest.raises(UnknownSessionError):
            await scene.report({**decision, "session_id": "nobody"}, clicked=True)
        assert "nobody" not in scene.runner.serving.table


async def test_a_session_whose_time_is_over_has_expired(tmp_path: Path) -> None:
    async with playing(tmp_path) as scene:
        decision = await scene.arrive("s")
        scene.now += 60_001
        assert await scene.report(decision, clicked=True) == {"session_id": "s", "ended": "expired"}
        assert document(await scene.runner.session("s"))["ended"] == "expired"


async def test_feedback_for_a_deleted_session_is_late_or_unknown_beyond_a_bound(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("worker.serve.runner.MOST_ENDED", 1)
    async with playing(tmp_path) as scene:
        forgotten, decision = [await scene.arrive(name) for name in ("forgotten", "s")]
        scene.now += 70_000  # 60 s and the lateness of 5 s
        scene.runner.serving.acknowledged(scene.now)
        await scene.arrive("another")
        assert "s" not in scene.runner.serving.table
        scene.now += 3_000
        with pytest.raises(UnknownSessionError, match="60 s after the arrival, and this comes at least 8 s") as late:
            await scene.report(decision, clicked=True)
        with pytest.raises(UnknownSessionError, match="never opened here") as unknown:
            await scene.report(forgotten, clicked=True)
        assert (late.value.over, unknown.value.over) == (True, False)
        serving, tally = scene.runner.serving, scene.metrics.snapshot().now.tally
        assert (tally.feedback, tally.late, tally.unknown, tally.troubles.reports["late-feedback"][0]) == (2, 1, 1, 2)
        assert not any(tally.imbalances([serving]).values())
    assert [fact["kind"] for fact in scene.facts()] == ["opened"] * 3


async def test_feedback_in_the_batch_that_deletes_its_session_is_late_too(tmp_path: Path) -> None:
    async with playing(tmp_path) as scene:
        decision = await scene.arrive("s")
        scene.now += 70_000
        scene.runner.serving.acknowledged(scene.now)
        with pytest.raises(UnknownSessionError, match="too late"):
            await scene.report(decision, clicked=True)


async def test_tokens_are_asked_for_where_there_is_a_secret(tmp_path: Path) -> None:
    async with playing(tmp_path, secret=Secret(b"0123456789abcdef")) as scene:
        decision = await scene.arrive("s")
        assert document(await scene.runner.session("s")) == decision
        with pytest.raises(Rejected, match="token"):
            await scene.report({**decision, "tokens": decision["tokens"][1:]}, clicked=False)
        assert (await scene.report(decision, clicked=False))["position"] == 2


async def test_without_room_fallback_ads_are_answered_and_nothing_is_kept(tmp_path: Path) -> None:
    async with playing(tmp_path, max_open_sessions=1) as scene:
        assert (await scene.arrive("one"))["mode"] != "fallback"
        answer = await scene.arrive("two")
        assert (answer["mode"], answer["slate"]) == ("fallback", ["coat", "shoe", "hat"])
        with pytest.raises(UnknownSessionError):
            await scene.report(answer, clicked=True)
    assert {fact["session_id"] for fact in scene.facts()} == {"one"}


async def test_time_never_goes_back(tmp_path: Path) -> None:
    async with playing(tmp_path) as scene:
        first = await scene.arrive("one")
        scene.now -= 10_000
        assert (await scene.arrive("two"))["arrived_at"] >= first["arrived_at"]


# ── deadlines ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_at_the_deadline_fallback_ads_or_mistakes_are_answered_and_the_session_goes_on(tmp_path: Path) -> None:
    async with playing(tmp_path) as scene:
        decision = await scene.arrive("known")
        release = _hold(scene)
        request = arrival("s", exclude=["coat"])
        answer = document(await scene.runner.arrive(request, scene.later(0.01)))
        assert (answer["fallback"], answer["mode"], answer["slate"]) == (True, "fallback", ["shoe", "hat"])
        fields = {"position": 1, "arm": decision["arm"], "clicked": False}
        passing = asyncio.ensure_future(scene.runner.feedback(answer_of("known", **fields), scene.later(0.01)))
        with pytest.raises(Rejected, match="dimension"):
            await scene.runner.arrive(arrival("t", [1, 2, 3]), scene.later(0.01))
        assert not passing.done(), "it is answered when it is durable"
        release.set()
        assert document(await passing)["slate"] == decision["slate"][1:]
        after = await scene.arrive("s", exclude=["coat"])
        assert "fallback" not in after
        assert document(await scene.runner.session("known"))["position"] == 2


def _hold(scene: Scene) -> asyncio.Event:
    """Let no batch be written until the event is set."""
    release, run_batch = asyncio.Event(), scene.runner._run_batch

    async def held(batch: Any) -> None:
        await release.wait()
        await run_batch(batch)

    scene.runner._run_batch = held  # type: ignore[method-assign]
    return release


# ── the disk ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_where_a_batch_cannot_be_committed_nothing_is_answered_any_more(tmp_path: Path) -> None:
    with CountingFolder(tmp_path) as state:
        scene = Scene(state)
        running = asyncio.create_task(scene.runner.run())
        await scene.arrive("s")
        state.is_full = True
        with pytest.raises(UnavailableError, match="disk is full"):
            await scene.arrive("t")
        with pytest.raises(FailedError, match="disk is full; nothing more is answered"):
            await running
        with pytest.raises(UnavailableError):
            await scene.arrive("u")
        assert scene.runner.ready() is not None
        assert [fact["session_id"] for fact in scene.facts()] == ["s"]


async def test_a_runner_that_is_started_again_knows_its_sessions(tmp_path: Path) -> None:
    async with playing(tmp_path) as before:
        answer = await before.report(await before.arrive("s"), clicked=False)
    async with playing(tmp_path) as after:
        assert document(await after.runner.session("s")) == answer
        assert await after.runner.session("nobody") is None
