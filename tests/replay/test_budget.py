"""A run that learns from a share of its sessions is reproduced from its log."""

from __future__ import annotations

import pytest

from worker.replay.relearn import relearn

from ..golden.recording import record
from .logs import Recorded, Replay, change, is_reproduced, journal, lines_of, payload, without

AT_MOST = 12


@pytest.fixture(scope="module", params=["ucbbp", "aucbbp"])
def sampled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    path = tmp_path_factory.mktemp("sampled") / "log"
    settings = {"learn_at_most": AT_MOST, "policy": request.param}
    runner = record(path, sessions=240, settings=settings, oddities=request.param == "ucbbp")
    return Recorded(final=runner.versions.newest, lines=lines_of(path))


def test_the_log_verifies_and_learning_again_gives_the_same_versions(sampled: Recorded, replayed: Replay) -> None:
    opened = {payload(line)["session_id"] for line in journal(sampled.lines, "opened")}
    shares = {payload(line).get("share", 1.0) for line in journal(sampled.lines, "opened")}
    assert len(opened) < 0.7 * 240
    assert min(shares) < 0.5
    assert any("opened" in payload(line) for line in journal(sampled.lines, "progress"))
    for report in is_reproduced(sampled.lines, replayed):
        assert report.sessions >= 230


def test_a_share_that_does_not_fit_the_plan_is_a_mismatch(sampled: Recorded, replayed: Replay) -> None:
    lines = sampled.copy()
    line = next(line for line in journal(lines, "opened") if payload(line).get("share", 1.0) < 1)
    change(line, share=payload(line)["share"] / 2)
    report = replayed(lines)
    assert "share" in {mismatch["name"] for mismatch in report.findings.as_json()}


def test_without_a_journal_and_with_other_settings_the_sessions_are_chosen_anew(
    sampled: Recorded, replayed: Replay
) -> None:
    for lines, options in (
        (without(sampled.lines, "journal"), {}),
        (sampled.lines, {"changes": {"learn_at_most": 6}}),
        (sampled.lines, {"changes": {"learn_at_most": 0}}),
    ):
        report = replayed(lines, relearn, **options)
        assert report.sessions >= 230, "all sessions are counted"
        assert len(report.versions) >= 5
