"""The figures and curves of a demo for the live view."""

from __future__ import annotations

from worker.simulation.demo.beside import Beside
from worker.simulation.demo.ledger import totals
from worker.simulation.demo.run import TICK, Demo
from worker.simulation.demo.summary import has_budget
from worker.simulation.live import Curve, Frame, Speed, compared_curves, revenue_curves
from worker.simulation.users import BEGINNING

RECENT = 10  # episodes that "lately" stands for
QUARTERS = 4


class DemoView:
    """The source of a demo's live view; `url` is the address of its web server, `beside` the run to compare with."""

    def __init__(self, demo: Demo, url: str, beside: Beside | None = None) -> None:
        self._demo, self._url, self._beside = demo, url, beside
        self._quarter = 0
        self._speed = Speed()

    @property
    def opening(self) -> tuple[str, ...]:
        """The addresses of metrics and status page."""
        return f"metrics: {self._url}/metrics", f"status page: {self._url}/"

    def line(self, seconds: float) -> str | None:
        """Return a line after each quarter of the run but the last."""
        demo = self._demo
        quarter = int(demo.done * QUARTERS)
        if quarter <= self._quarter or demo.finished:
            return None
        self._quarter = quarter
        return (
            f"{demo.done:4.0%}  episode {len(demo.rows)} of {demo.settings.episodes}, {totals(demo.rows).sessions:,} "
            f"sessions, lately {totals(demo.rows[-RECENT:]).share:.1%} of the oracle's revenue"
        )

    def frame(self, seconds: float) -> Frame:
        """Return the state of the demo."""
        demo, settings = self._demo, self._demo.settings
        minutes, rest = divmod((demo.time - BEGINNING) // TICK, 60)
        # Sorted by name: an order by growing numbers would jump.
        letters = "  ".join(f"{reason} {count}" for reason, count in sorted(demo.dead_letters.items()))
        return Frame(
            title=f"[bold]adcascade demo[/]  {settings.environment} · {settings.model} · {settings.policy} · "
            f"seed {settings.seed}",
            address=f"{self._url}/ · /metrics",
            colour="cyan",
            done=demo.done,
            status=f"[dim]episode[/] {len(demo.rows)}/{settings.episodes}  "
            f"[dim]event time[/] {minutes // 60}:{minutes % 60:02}:{rest:02}  [dim]in[/] {seconds:.0f} s",
            figures=self._figures(seconds),
            curves=self._curves(),
            footer=("dead letters", letters or "none"),
        )

    def _comparison(self) -> list[tuple[str, str]]:
        runs = (self._demo,) if self._beside is None else (self._demo, self._beside)
        return [(run.settings.model, f"{totals(run.rows[-RECENT:]).share:.1%} of oracle") for run in runs]

    def _curves(self) -> tuple[Curve, ...]:
        demo, beside, total = self._demo, self._beside, self._demo.settings.episodes
        if beside is None:
            return revenue_curves([row.score for row in demo.rows], total)
        runs = [(run.settings.model, [row.score for row in run.rows]) for run in (demo, beside)]
        return compared_curves(runs, total)

    def _figures(self, seconds: float) -> list[tuple[str, str]]:
        demo = self._demo
        whole, lately = totals(demo.rows), totals(demo.rows[-RECENT:])
        sessions = max(1, lately.sessions)
        displays = max(1, sum(row.episode.displays for row in demo.rows[-RECENT:]))
        budget = f" (of {lately.allowed / sessions:.1%})" if has_budget(demo) else ""
        decisions = demo.counts["decisions"]
        return [
            ("sessions", f"{whole.sessions:,}"),
            ("revenue earned", f"{whole.earned:,.1f}"),
            ("exploring", f"{lately.explored / sessions:.1%}{budget}"),
            ("decisions", f"{decisions:,} ({self._speed.at(seconds, decisions):,.0f}/s)"),
            ("slates served", f"{whole.served:,.1f}"),
            ("parameters", f"version {demo.parameters.version}"),
            ("click rate", f"{lately.clicks / displays:.1%} of displays"),
            ("oracle", f"{whole.oracle:,.1f}"),
            ("open sessions", f"{demo.open_sessions:,}"),
            ("best ads", f"{lately.right_share:.0%} served"),
            *self._comparison(),
        ]
