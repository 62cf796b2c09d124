"""The plots of a demo's report. Each function returns a PNG.

`beside` is the same run with the additive model, where there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from worker.bandit.arrays import Floats
from worker.simulation.demo.ledger import Row, totals
from worker.simulation.demo.report import has_budget, heads
from worker.simulation.demo.run import Beside, Demo
from worker.simulation.plots import LOOKS, drawing, rendered, whole_numbers
from worker.simulation.world import true_heads
from worker.simulation.worth import tenths

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DPI, FILE = 150, "report.png"
ORACLE, FAINT, DARK = "#888888", "#bdbdbd", "#333333"
BESIDE = "#56B4E9"
GOOD = 0.98  # share of the oracle's revenue that is marked
BOUND, POSTERIOR = "#E69F00", "#CC79A7"
TRUTH = "#D55E00"
MOST_LABELS = 12  # under one axis
SURE = 1.96  # standard deviations of a 95 % interval
MOST_COLUMNS = 12  # ads in the picture of tastes
MOST_DOTS = 400
LEGIBLE = 0.15  # share from which a cell has its number


def tastes(demo: Demo, beside: Beside | None) -> bytes:
    """Draw which kinds of users get which ads: early, late, as the truth would have it, and with the additive model."""
    early, late = tenths(demo.rows)
    panels = [
        (f"{_name(demo)}: first tenth", shares_by_kind(early), totals(early).right_share),
        (f"{_name(demo)}: last tenth", shares_by_kind(late), totals(late).right_share),
        ("what the truth would show", shares_by_kind(demo.rows, best=True), None),
    ]
    if beside is not None and beside.rows:
        last = tenths(beside.rows)[1]
        panels.append((f"{_name(beside)}: last tenth", shares_by_kind(last), totals(last).right_share))
    # The ads that someone gets, from the one that most users should get.
    need = panels[2][1].sum(axis=0) + 1e-3 * sum(share.sum(axis=0) for _, share, _ in panels)
    columns = np.argsort(-need, kind="stable")[: min(MOST_COLUMNS, int((need > 0).sum()))]
    kinds = demo.ledger.kinds.names
    with drawing(3.0 * len(panels) + 0.6, 0.26 * len(kinds) + 1.9, dpi=DPI) as figure:
        grid = figure.subplots(1, len(panels), sharey=True)
        for axes, (title, shares, right) in zip(grid, panels, strict=True):
            _heat(axes, shares[:, columns])
            note = "" if right is None else f"{right:.0%} of each user's best ads"
            axes.set_title(f"{title}\n", fontsize=10)
            axes.text(0, 1.02, note, transform=axes.transAxes, fontsize=8.5, color="#555555", va="bottom")
            axes.set_xticks(range(len(columns)), [demo.users.arms[k].arm for k in columns], rotation=90, fontsize=8)
            axes.set_xlabel("ad in the slate")
        grid[0].set_yticks(range(len(kinds)), kinds, fontsize=8.5)
        grid[0].set_ylabel("users, by their strongest feature" if demo.settings.environment != "digits" else "users")
        return rendered(figure, FILE)


def shares_by_kind(rows: Sequence[Row], *, best: bool = False) -> Floats:
    """Return the share of each kind's users with each ad in their slate, as served or the best: (kinds, K)."""
    counts = np.sum([row.score.best if best else row.score.shown for row in rows], axis=0)
    return np.asarray(counts / np.maximum(1, np.sum([row.score.kinds for row in rows], axis=0))[:, None])


def _heat(axes: Axes, shares: Floats) -> None:
    """Draw shares as darkness, and as numbers where they are large."""
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    axes.grid(visible=False)
    axes.tick_params(length=0)
    for row, column in np.argwhere(shares >= LEGIBLE):
        share = shares[row, column]
        colour = "w" if share > 0.5 else DARK
        axes.text(column, row, f"{100 * share:.0f}", ha="center", va="center", fontsize=7, color=colour)


def revenue(demo: Demo, beside: Beside | None) -> bytes:
    """Draw the revenue of every episode and the oracle's, and the share of both."""
    with drawing(7.4, 5.6, dpi=DPI) as figure:
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(1.4, 1.2))
        _episode_axis(upper, demo, label=0.03)
        upper.scatter(*_series(demo, lambda row: row.episode.reward), s=11, color=FAINT, label="earned", zorder=2)
        oracle = _series(demo, lambda row: row.score.oracle)
        upper.plot(*oracle, label="oracle", color=ORACLE, linestyle="--", linewidth=1.3)
        _episode_axis(lower, demo)
        lower.axhline(1.0, color=ORACLE, linestyle="--", linewidth=1.0)
        lower.axhline(GOOD, color=FAINT, linestyle=":", linewidth=1.2)
        _at_the_end(lower, GOOD, "#888888")
        for run, colour, width in _runs(demo, beside):
            upper.plot(*_series(run, lambda row: row.score.served), label=_name(run), color=colour, linewidth=width)
            lower.plot(*_series(run, lambda row: row.score.share), color=colour, linewidth=width)
            if run is beside:
                _at_the_end(lower, totals(tenths(run.rows)[1]).share, colour)
        upper.set(title="Revenue per episode", ylabel="revenue", ylim=(0, None))
        upper.legend(loc="lower right", ncols=4)
        lower.set(title="Served, as a share of the oracle's", xlabel="episode t")
        _percent(lower)
        return rendered(figure, FILE)


def regret(demo: Demo, beside: Beside | None) -> bytes:
    """Draw the time-averaged regrets: the true one, and the two that need no truth."""
    with drawing(7.4, 3.9, dpi=DPI) as figure:
        axes = figure.subplots()
        _episode_axis(axes, demo, label=0.03)
        for run, colour, width in _runs(demo, beside):
            true = _per_session(run, lambda row: row.score.regret_per_session)
            axes.plot(*true, label=f"truth: {_name(run)}", color=colour, linewidth=width + 0.5)
        bound = _per_session(demo, lambda row: row.episode.regret_bound)
        axes.plot(*bound, label="bound, if the model is right", color=BOUND, linestyle="--", linewidth=1.4)
        posterior = _per_session(demo, lambda row: row.episode.regret_posterior)
        axes.plot(*posterior, label="posterior, if the model is right", color=POSTERIOR, linestyle="-.", linewidth=1.4)
        axes.set(title="Time-averaged regret per session", xlabel="episode t", yscale="log")
        axes.set_ylabel("Σ regret / Σ sessions, up to t")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.legend(loc="upper right")
        return rendered(figure, FILE)


def clicks(demo: Demo, beside: Beside | None) -> bytes:
    """Draw the click rate by position, early and late."""
    early, late = tenths(demo.rows)
    positions = np.arange(1, demo.settings.horizon + 1)
    with drawing(7.4, 3.6, dpi=DPI) as figure:
        axes = figure.subplots()
        for rows, offset, colour, label in (
            (early, -0.2, FAINT, "first tenth of the episodes"),
            (late, 0.2, _colour(demo), "last tenth"),
        ):
            seen = np.maximum(1, np.sum([row.score.answered for row in rows], axis=0))
            rate = np.sum([row.score.clicked for row in rows], axis=0) / seen
            error = SURE * np.sqrt(rate * (1 - rate) / seen)
            axes.bar(positions + offset, rate, width=0.38, color=colour, label=label)
            axes.errorbar(positions + offset, rate, error, fmt="none", ecolor=DARK, elinewidth=0.8, capsize=2)
        axes.set(title="Click rate by position", xlabel="position h", ylabel="clicks / answered displays")
        axes.set_xticks(positions)
        axes.grid(axis="x", visible=False)
        _percent(axes)
        axes.legend(loc="upper left")
        return rendered(figure, FILE)


def exploration(demo: Demo, beside: Beside | None) -> bytes:
    """Draw the share of sessions that explored, and the share allowed to."""
    episodes, sessions = _series(demo, lambda row: max(1, row.score.sessions))
    _, explored = _series(demo, lambda row: row.episode.explored)
    _, allowed = _series(demo, lambda row: row.allowed)
    with drawing(7.4, 3.6, dpi=DPI) as figure:
        budget = has_budget(demo)
        left, *others = figure.subplots(1, 2, width_ratios=(1.5, 1.0)) if budget else [figure.subplots()]
        _episode_axis(left, demo, label=0.3)
        left.plot(episodes, explored / sessions, "o", markersize=3.4, color=_colour(demo), label="explored")
        left.set(title="Sessions that explored", xlabel="episode t", ylabel="share of the sessions")
        left.set_ylim(0, min(1.02, 1.15 * max(0.1, float((explored / sessions).max()))))
        _percent(left)
        for right in others:
            left.plot(episodes, allowed / sessions, label="budget M / N", color=DARK, linewidth=1.2)
            total = np.cumsum(allowed)
            right.fill_between(episodes, 0.95 * total, 1.05 * total, color="#eeeeee", label="± 5 %")
            right.plot(episodes, total, label="budget", color=DARK, linewidth=1.2)
            right.plot(episodes, np.cumsum(explored), label="explored", color=_colour(demo), linewidth=1.8)
            right.set(title="Cumulative", xlabel="episode t", ylabel="sessions", ylim=(0, None))
            right.legend(loc="lower right")
        left.legend(loc="upper right")
        return rendered(figure, FILE)


def estimates(demo: Demo, beside: Beside | None) -> bytes:
    """Draw the final estimates and the truth: of each ad for the average user, and of tastes."""
    estimate, deviation = heads(demo.parameters)
    rewards, world = demo.world.rewards, demo.world
    order = np.argsort(rewards, kind="stable")
    with drawing(9.4, 4.2, dpi=DPI) as figure:
        left, right = figure.subplots(1, 2, width_ratios=(1.5, 1.0))
        x = np.arange(len(order))
        _estimated(left, x, estimate[order, 0], deviation[order, 0], capsize=3, label="estimate, 95 %")
        left.scatter(x, world.biases[order], marker="_", s=170, color=TRUTH, linewidth=2.2, label="truth", zorder=3)
        labels = [f"{demo.users.arms[k].arm}\n{rewards[k]:.2f}" for k in order]
        every = -(-len(labels) // MOST_LABELS)
        left.set_xticks(x[::every], labels[::every], fontsize=8)
        left.grid(axis="x", visible=False)
        left.set(title="Arms, by rising revenue", xlabel="arm and its revenue per click", ylabel="log-odds at x = 0")
        left.legend(loc="best")
        if world.columns is not None:
            right.set_visible(False)  # no coefficients: the truth is not linear in the pixels
        else:
            effects = true_heads(world.truth)[:, 1:].ravel()
            chosen = np.linspace(0, len(effects) - 1, min(len(effects), MOST_DOTS)).astype(int)
            dots = (numbers[: len(rewards), 1:].ravel()[chosen] for numbers in (estimate, deviation))
            _against_truth(right, effects[chosen], *dots)
        return rendered(figure, FILE)


def _against_truth(axes: Axes, truth: Floats, estimate: Floats, deviation: Floats) -> None:
    limit = 1.1 * max(1e-3, float(np.abs(np.concatenate([truth, estimate])).max()))
    axes.plot([-limit, limit], [-limit, limit], color=TRUTH, linewidth=1.4, zorder=1)
    _estimated(axes, truth, estimate, deviation, alpha=0.75)
    axes.set(xlim=(-limit, limit), ylim=(-limit, limit))
    axes.set(title="Effects of features, of every ad", xlabel="truth", ylabel="estimate, 95 %")


def _estimated(axes: Axes, x: Any, estimate: Floats, deviation: Floats, **more: Any) -> None:
    colour = LOOKS["ucbbp"][0]
    axes.errorbar(x, estimate, SURE * deviation, fmt="o", color=colour, markersize=4, elinewidth=1, **more)


# ── shared parts ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _runs(demo: Demo, beside: Beside | None) -> list[tuple[Demo | Beside, str, float]]:
    """Return the runs with their colours and the widths of their lines; the demo last, above the other."""
    others: list[tuple[Demo | Beside, str, float]] = [(beside, BESIDE, 1.5)] if beside and beside.rows else []
    return [*others, (demo, _colour(demo), 1.8)]


def _colour(demo: Demo) -> str:
    return LOOKS[demo.settings.policy][0]


def _name(run: Demo | Beside) -> str:
    return f"{run.settings.model} model"


def _series(run: Demo | Beside, number: Callable[[Row], float | None]) -> tuple[Floats, Floats]:
    """Return the episodes and a number of each; None becomes 0."""
    return np.array([row.index + 1.0 for row in run.rows]), np.array([number(row) or 0.0 for row in run.rows])


def _per_session(run: Demo | Beside, number: Callable[[Row], float | None]) -> tuple[Floats, Floats]:
    """Return the episodes and the mean of a number over all sessions up to each."""
    episodes, values = _series(run, number)
    sessions = np.array([row.score.sessions for row in run.rows])
    return episodes, np.asarray(np.cumsum(values * sessions) / np.maximum(1, np.cumsum(sessions)))


def _episode_axis(axes: Axes, demo: Demo, label: float | None = None) -> None:
    """Set up the axis of episodes and mark the warm-up; `label` is the height of its text, 0 to 1."""
    axes.set_xlim(0.5, demo.rows[-1].index + 1.5)
    whole_numbers(axes.xaxis)
    learning = demo.learning
    if not learning.warmup:
        return
    # The policy begins with the version that folds `warmup` windows, which is published when they are closed.
    served = learning.warmup * learning.window + learning.session_timeout + 2 * learning.lateness
    end = 0.5 + served / learning.window
    axes.axvspan(0.5, end, color="#f2f2f2", zorder=0)
    if label is not None:
        style: dict[str, Any] = {"color": "#888888", "fontsize": 7.5, "rotation": 90, "ha": "center", "va": "bottom"}
        axes.text((0.5 + end) / 2, label, "warm-up", transform=axes.get_xaxis_transform(), **style)


def _at_the_end(axes: Axes, share: float, colour: str) -> None:
    """Write a share at its height to the right of the axes."""
    place: Any = ("axes fraction", "data")
    axes.annotate(f"{share:.0%}", (1.005, share), xycoords=place, fontsize=8, color=colour, va="center")


def _percent(axes: Axes) -> None:
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
