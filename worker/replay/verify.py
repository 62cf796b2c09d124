"""Verification of a log: every decision planned again, every version folded again."""

from __future__ import annotations

from worker.logs.ordered import OrderedLog
from worker.logs.sorting import MEMORY
from worker.logs.stages import Stage, silent, ticking
from worker.replay.decisions import DecisionAudit
from worker.replay.report import ReplayReport, read_traffic
from worker.replay.versions import FoldAudit
from worker.stream.topology import Topics


def verify(
    path: str,
    *,
    topics: Topics | None = None,
    skip_bad: bool = False,
    tolerance: float = 0.0,
    memory: int = MEMORY,
    stage: Stage = silent,
) -> ReplayReport:
    """Check every decision and every version of a log.

    `tolerance` is the largest relative difference between the numbers of equal versions, for logs of other machines.
    """
    report = ReplayReport(mode="verify")
    with OrderedLog(topics or Topics(), report.findings, memory=memory) as log:
        reader = read_traffic(path, log, skip_bad=skip_bad, stage=stage)
        with stage("folding the versions again", len(log.journal)) as bar:
            FoldAudit(log.versions, report, tolerance=tolerance).run(ticking(log.journal_records(), bar))
        with stage("planning the decisions again", len(log.traffic)) as bar:
            DecisionAudit(log, report).run(ticking(log.entries(), bar))
        return report.describe(log, reader)
