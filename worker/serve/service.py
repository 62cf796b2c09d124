"""`AdService` on the runner of this process: deadlines and fallback ads."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import cast

import msgspec

from worker.http.service import (
    Answer,
    ArriveRequest,
    FeedbackRequest,
    UnavailableError,
    UnknownSessionError,
    fallback_answer,
    judged_arrival,
)
from worker.secret import Secret
from worker.serve.runner import NEVER_OPENED, ServeRunner, Waiting
from worker.stream.decoding import Limits, Rejected, decode_feedback
from worker.stream.feedback import check_token
from worker.stream.session import Session


class EmbeddedService:
    """Answers from the sessions of this process."""

    def __init__(self, runner: ServeRunner, limits: Limits, *, secret: Secret | None = None) -> None:
        self._runner = runner
        self._limits = limits
        self._secret = secret
        self._loop = asyncio.get_running_loop()

    def ready(self) -> str | None:
        """Return None, or why no requests can be taken."""
        return self._runner.failure

    def arrive(self, request: ArriveRequest, deadline: float) -> Awaitable[Answer]:
        """Open a session, or find it; return its current decision."""
        return self._answer(Waiting(kind="arrive", session_id=request.session_id, request=request), deadline)

    def feedback(self, request: FeedbackRequest, deadline: float) -> Awaitable[Answer]:
        """Take a click or a pass; return the next decision, or how the session ended."""
        return self._answer(Waiting(kind="feedback", session_id=request.session_id, request=request), deadline)

    async def session(self, session_id: str) -> Answer | None:
        """Return the answer that the last request of a session would have now.

        It follows the batch before it, so that nothing is shown that a crash could take back.
        """
        return await self._runner.submit(Waiting(kind="look", session_id=session_id))

    def _answer(self, waiting: Waiting, deadline: float) -> Awaitable[Answer]:
        answering = self._runner.submit(waiting)
        timer = self._loop.call_at(deadline, self._answer_fallback, waiting)
        answering.add_done_callback(lambda _: timer.cancel())
        return cast(Awaitable[Answer], answering)  # the runner answers these requests, or fails them

    # ── fallback ads ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _answer_fallback(self, waiting: Waiting) -> None:
        """Answer what has waited until its deadline."""
        request = waiting.request
        if waiting.future.done():  # its timer is not cancelled yet
            return
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
        settings = self._runner.versions.newest.settings
        arrival = judged_arrival(request.record(now), now, settings, self._limits)
        return fallback_answer(self._runner.versions.at(now), arrival)

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
