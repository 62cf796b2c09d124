"""The plots of a demo's report. Each function returns a PNG.

`other` is the same run with the additive model, where there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from worker.bandit.arrays import Floats
from worker.simulation.demo.ledger import Row, totals
from worker.simulation.demo.run import Demo, FinishedRun
from worker.simulation.demo.summary import has_budget, heads
from worker.simulation.plots import LOOKS, drawing, rendered
from worker.simulation.world import true_heads
from worker.simulation.worth import tenths

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DPI, FILE = 150, "report.png"
ORACLE, FAINT, DARK = "#888888", "#bdbdbd", "#333333"
OTHER = "#56B4E9"
GOOD = 0.98  # share of the oracle's revenue that is marked
TRUTH = "#D55E00"
MOST_LABELS = 12  # under one axis
SURE = 1.96  # standard deviations of a 95 % interval
MOST_COLUMNS = 12  # ads in the picture of tastes
MOST_DOTS = 400
LEGIBLE = 0.15  # share from which a cell has its number


def tastes(demo: Demo, other: FinishedRun | None) -> bytes:
    """Draw which kinds of users get which ads: early, late, as the truth would have it, and with the additive model."""
    early, late = tenths(demo.rows)
    panels = [
        (f"{_name(demo)}: first tenth", shares_by_kind(early), totals(early).right_share),
        (f"{_name(demo)}: last tenth", shares_by_kind(late), totals(late).right_share),
        ("what the truth would show", shares_by_kind(demo.rows, best=True), None),
    ]
    if other is not None:
        last = tenths(other.rows)[1]
        panels.append((f"{_name(other)}: last tenth", shares_by_kind(last), totals(last).right_share))
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
    counts = np.sum([row.best if best else row.shown for row in rows], axis=0)
    return np.asarray(counts / np.maximum(1, np.sum([row.kinds for row in rows], axis=0))[:, None])


def _heat(axes: Axes, shares: Floats) -> None:
    """Draw shares as darkness, and as numbers where they are large."""
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    axes.grid(visible=False)
    axes.tick_params(length=0)
    for row, column in np.argwhere(shares >= LEGIBLE):
        share = shares[row, column]
        colour = "w" if share > 0.5 else DARK
        axes.text(column, row, f"{100 * share:.0f}", ha="center", va="center", fontsize=7, color=colour)


def revenue(demo: Demo, other: FinishedRun | None) -> bytes:
    """Draw the revenue of every episode as a share of the oracle's."""
    with drawing(7.4, 4.0, dpi=DPI) as figure:
        axes = figure.subplots()
        _episode_axis(axes, demo)
        axes.axhline(1.0, label="oracle", color=ORACLE, linestyle="--", linewidth=1.0)
        axes.axhline(GOOD, color=FAINT, linestyle=":", linewidth=1.2)
        _at_the_end(axes, GOOD, ORACLE)
        earned = _series(demo, lambda row: row.episode.reward / max(1e-9, row.worth.oracle))
        axes.scatter(*earned, s=11, color=FAINT, label="earned", zorder=2)
        if other is not None:
            axes.plot(*_series(other, _share), label=_name(other), color=OTHER, linewidth=1.5)
            _at_the_end(axes, totals(tenths(other.rows)[1]).worth.share, OTHER)
        axes.plot(*_series(demo, _share), label=_name(demo), color=_colour(demo), linewidth=1.8)
        axes.set(title="Revenue per episode", xlabel="episode t", ylabel="share of the oracle's revenue")
        axes.yaxis.set_major_formatter("{x:.0%}")
        axes.legend(loc="lower right", ncols=4)
        return rendered(figure, FILE)


def exploration(demo: Demo, other: FinishedRun | None) -> bytes:
    """Draw the share of sessions that explored, and the share allowed to."""
    episodes, explored = _series(demo, lambda row: row.episode.explored / max(1, row.worth.sessions))
    with drawing(7.4, 3.6, dpi=DPI) as figure:
        axes = figure.subplots()
        _episode_axis(axes, demo)
        axes.plot(episodes, explored, "o", markersize=3.4, color=_colour(demo), label="explored")
        if has_budget(demo):
            allowed = _series(demo, lambda row: row.allowed / max(1, row.worth.sessions))
            axes.plot(*allowed, label="budget M / N", color=DARK, linewidth=1.2)
        axes.set(title="Sessions that explored", xlabel="episode t", ylabel="share of the sessions")
        axes.set_ylim(0, min(1.02, 1.15 * max(0.1, float(explored.max()))))
        axes.yaxis.set_major_formatter("{x:.0%}")
        axes.legend(loc="upper right")
        return rendered(figure, FILE)


def estimates(demo: Demo, other: FinishedRun | None) -> bytes:
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


def _colour(demo: Demo) -> str:
    return LOOKS[demo.settings.policy][0]


def _name(run: Demo | FinishedRun) -> str:
    return f"{run.settings.model} model"


def _share(row: Row) -> float:
    return row.worth.share


def _series(run: Demo | FinishedRun, number: Callable[[Row], float]) -> tuple[Floats, Floats]:
    """Return the episodes and a number of each."""
    return np.array([row.index + 1.0 for row in run.rows]), np.array([number(row) for row in run.rows])


def _episode_axis(axes: Axes, demo: Demo) -> None:
    """Set up the axis of episodes and mark the warm-up."""
    axes.set_xlim(0.5, demo.rows[-1].index + 1.5)
    axes.locator_params(axis="x", integer=True)
    learning = demo.learning
    if not learning.warmup:
        return
    # The policy begins with the version that folds `warmup` windows, which is published when they are closed.
    served = learning.warmup * learning.window + learning.session_timeout + 2 * learning.lateness
    end = 0.5 + served / learning.window
    axes.axvspan(0.5, end, color="#f2f2f2", zorder=0)
    style: dict[str, Any] = {"color": "#888888", "fontsize": 7.5, "rotation": 90, "ha": "center", "va": "bottom"}
    axes.text((0.5 + end) / 2, 0.3, "warm-up", transform=axes.get_xaxis_transform(), **style)


def _at_the_end(axes: Axes, share: float, colour: str) -> None:
    """Write a share at its height to the right of the axes."""
    place: Any = ("axes fraction", "data")
    axes.annotate(f"{share:.0%}", (1.005, share), xycoords=place, fontsize=8, color=colour, va="center")
