"""`AdService` on the runner of this process: deadlines, fallback ads, and orders."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import Final, NamedTuple, cast

import msgspec

from worker.errors import FailedError
from worker.http.service import Answer, ArriveRequest, FeedbackRequest, UnavailableError, UnknownSessionError
from worker.secret import Secret
from worker.serve.runner import NEVER_OPENED, ServeRunner, Waiting
from worker.stream.decoding import Limits, Rejected, decode_arrival, decode_feedback
from worker.stream.encoding import encode_decision
from worker.stream.events import Order
from worker.stream.features import context_encoder
from worker.stream.feedback import check_token
from worker.stream.session import Session

#: Refusals that are kept for whoever gave the order.
_MOST_REFUSED: Final = 100


class _Due(NamedTuple):
    deadline: float
    waiting: Waiting


class EmbeddedService:
    """Answers from the sessions of this process.

    Parameters
    ----------
    unready : why requests cannot be taken, or None; the runner's own failures come first
    """

    def __init__(
        self,
        runner: ServeRunner,
        limits: Limits,
        unready: Callable[[], str | None] = lambda: None,
        *,
        secret: Secret | None = None,
    ) -> None:
        self._runner = runner
        self._limits = limits
        self._secret = secret
        self._unready = unready
        self._loop = asyncio.get_running_loop()
        # All requests have the same time, so the deadlines come in the order of the requests.
        self._due: deque[_Due] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def ready(self) -> str | None:
        """Return None, or why no requests can be taken."""
        return self._runner.failure or self._unready()

    def arrive(self, request: ArriveRequest, deadline: float) -> Awaitable[Answer]:
        """Open a session, or find it; return its current decision."""
        waiting = Waiting(
            kind="arrive", session_id=request.session_id, request=request, future=self._loop.create_future()
        )
        return self._answer(waiting, deadline)

    def feedback(self, request: FeedbackRequest, deadline: float) -> Awaitable[Answer]:
        """Take a click or a pass; return the next decision, or how the session ended."""
        waiting = Waiting(
            kind="feedback", session_id=request.session_id, request=request, future=self._loop.create_future()
        )
        return self._answer(waiting, deadline)

    async def session(self, session_id: str) -> Answer | None:
        """Return the answer that the last request of a session would have now.

        It follows the batch before it, so that nothing is shown that a crash could take back.
        """
        waiting = Waiting(kind="look", session_id=session_id, future=self._loop.create_future())
        return await self._runner.submit(waiting)

    def _answer(self, waiting: Waiting, deadline: float) -> Awaitable[Answer]:
        answering = self._runner.submit(waiting)
        due = self._due
        while due and due[0].waiting.future.done():
            due.popleft()
        due.append(_Due(deadline, waiting))
        if self._timer is None:
            self._timer = self._loop.call_at(deadline, self._answer_due)
        return cast(Awaitable[Answer], answering)  # the runner answers these requests, or fails them

    # ── fallback ads ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _answer_due(self) -> None:
        """Answer what has waited until its deadline, and look again at the next one."""
        self._timer, now, due = None, self._loop.time(), self._due
        while due and (due[0].waiting.future.done() or due[0].deadline <= now):
            waiting = due.popleft().waiting
            if not waiting.future.done():
                self._answer_fallback(waiting)
        if due:
            self._timer = self._loop.call_at(due[0].deadline, self._answer_due)

    def _answer_fallback(self, waiting: Waiting) -> None:
        request = waiting.request
        answer: Answer | None = None
        try:
            if isinstance(request, ArriveRequest):
                answer = self._fallback_arrival(request)
            elif isinstance(request, FeedbackRequest):
                answer = self._fallback_feedback(request)
        except (Rejected, UnknownSessionError) as error:  # the client's mistakes are the same at any time
            waiting.future.set_exception(error)
        else:
            if answer is None:
                waiting.future.set_exception(UnavailableError("the deadline has come; send the request again"))
            else:
                waiting.future.set_result(answer)

    def _fallback_arrival(self, request: ArriveRequest) -> Answer:
        now = self._runner.now()
        planner, settings = self._runner.versions.at(now), self._runner.versions.newest.settings
        arrival = decode_arrival(
            request.record(now),
            limits=self._limits,
            dim=settings.dim,
            timestamp=now,
            grace=settings.grace,
            encoder=context_encoder(settings.features),
            standardise=settings.standardise,
        )
        slate, version = planner.fallback(arrival), planner.parameters.version
        session = Session(now, now, b"", (), version, *slate)
        return Answer(request.session_id, encode_decision(session.decision(request.session_id, None)), fallback=True)

    def _fallback_feedback(self, request: FeedbackRequest) -> Answer | None:
        """Return what is next if the feedback counts: later ads of the same slate."""
        session = self._runner.serving.table.get(request.session_id)
        if session is None and not self._runner.is_arriving(request.session_id):
            raise UnknownSessionError(NEVER_OPENED)
        if type(session) is not Session:
            return None
        now = self._runner.now()
        feedback = decode_feedback(
            request.record(now),
            limits=self._limits,
            horizon=self._runner.versions.horizon,
            timestamp=now,
            grace=self._runner.versions.newest.settings.grace,
        )
        position, arm = feedback.position, feedback.arm
        if self._secret is not None and session.arrived_at != check_token(
            self._secret, feedback.token, session_id=request.session_id, position=position, arm=arm
        ):
            raise Rejected("token", "$.token is missing or does not belong to this display")
        expected = msgspec.structs.replace(session)
        verdict = expected.apply(feedback)
        if verdict == "position":
            raise Rejected(verdict, f"$.position is beyond the slate of {len(session.slate)}")
        if verdict == "arm-mismatch":
            raise Rejected(verdict, "$.arm is not what was shown at that position")
        return self._runner.answer_from(request.session_id, expected)._replace(fallback=True)


class OrderDesk:
    """Gives orders to the learner, and waits for what becomes of them; `patience` is in seconds."""

    patience = 30.0

    def __init__(self, runner: ServeRunner) -> None:
        self._runner = runner
        self._loop = asyncio.get_running_loop()
        self._position = -1
        self._reported: asyncio.Future[None] = self._loop.create_future()
        self._refused: dict[int, str] = {}  # by offset in the journal, the last ones

    async def order(self, order: Order) -> int:
        """Write an order to the journal; return the version after it. Raises `FailedError` if it is refused."""
        waiting = Waiting(kind="order", order=order, future=self._loop.create_future())
        await self._runner.submit(waiting)
        try:
            async with asyncio.timeout(self.patience):
                await self.learned(waiting.offset + 1)
        except TimeoutError:
            raise FailedError(
                f"the learner has not answered within {self.patience:g} s; the order is in the journal and will be "
                "carried out. What does /readyz say?"
            ) from None
        if (reason := self._refused.pop(waiting.offset, None)) is not None:
            raise FailedError(f"refused: {reason}")
        return self._runner.versions.newest.version

    async def learned(self, position: int) -> None:
        """Wait until the learner has folded the journal up to an offset, and what it made is kept."""
        while self._position < position:
            await asyncio.shield(self._reported)

    def report(self, position: int, refused: Iterable[tuple[int, str]]) -> None:
        """Note how far the learner has come, and the orders that were refused."""
        self._refused.update(refused)
        while len(self._refused) > _MOST_REFUSED:
            del self._refused[next(iter(self._refused))]
        self._position = position
        reported, self._reported = self._reported, self._loop.create_future()
        reported.set_result(None)
