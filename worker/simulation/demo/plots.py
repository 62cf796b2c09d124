"""The plots of a demo's report: regret, revenue, clicks, exploration, estimates. Each function returns a PNG."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from worker.bandit.arrays import Floats
from worker.simulation.demo.ledger import Row
from worker.simulation.demo.run import Demo
from worker.simulation.demo.summary import has_budget
from worker.simulation.plots import LOOKS, drawing, rendered
from worker.simulation.worth import tenths

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ORACLE, FAINT, DARK = "#888888", "#bdbdbd", "#333333"
BOUND, POSTERIOR = "#E69F00", "#CC79A7"
TRUTH = "#D55E00"
MOST_LABELS = 12  # under one axis
SURE = 1.96  # standard deviations of a 95 % interval


def _png(size: tuple[float, float], draw: Callable[[Figure], None]) -> bytes:
    with drawing(dpi=150):
        from matplotlib.figure import Figure

        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        return rendered(figure, "report.png")


def _episodes(rows: Sequence[Row]) -> Floats:
    return np.array([row.index + 1.0 for row in rows])


def _per_session(rows: Sequence[Row], number: Callable[[Row], float | None]) -> Floats:
    """Return running sums of a number per session, over running sums of the sessions."""
    sessions = np.array([row.score.sessions for row in rows], dtype=np.float64)
    values = np.array([number(row) for row in rows], dtype=np.float64)  # None becomes NaN
    return np.asarray(np.cumsum(np.nan_to_num(values) * sessions) / np.maximum(1, np.cumsum(sessions)))


def _episode_axis(axes: Axes, demo: Demo, label: float | None = None) -> None:
    """Set up the axis of episodes and mark the warm-up; `label` is the height of its text, 0 to 1."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlim(0.5, demo.rows[-1].index + 1.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    learning = demo.learning
    if not learning.warmup:
        return
    # The policy begins with the version that folds `warmup` windows, which is published when they are closed.
    served = learning.warmup * learning.window + learning.session_timeout + 2 * learning.lateness
    end = 0.5 + served / learning.window
    axes.axvspan(0.5, end, color="#f2f2f2", zorder=0)
    if label is not None:
        axes.text(
            (0.5 + end) / 2,
            label,
            "warm-up",
            transform=axes.get_xaxis_transform(),
            color="#888888",
            fontsize=7.5,
            rotation=90,
            ha="center",
            va="bottom" if label < 0.5 else "top",
        )


def _line(axes: Axes, demo: Demo, values: Floats, label: str, **more: Any) -> None:
    axes.plot(_episodes(demo.rows), values, label=label, **{"linewidth": 1.8, **more})


# ── the plots ────────────────────────────────────────────────────────────────────────────────────────────────────────


def regret(demo: Demo) -> bytes:
    """Draw the time-averaged regrets: the true one, and the two that need no truth."""
    rows = demo.rows
    pseudo = _per_session(rows, lambda row: row.score.regret / max(1, row.score.sessions))
    posterior = _per_session(rows, lambda row: row.episode.regret_posterior)
    bound = _per_session(rows, lambda row: row.episode.regret_bound)

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        _episode_axis(axes, demo, label=0.03)
        _line(axes, demo, bound, "bound: optimistic gap", color=BOUND, linestyle="--", linewidth=1.4)
        _line(axes, demo, posterior, "estimate: posterior regret", color=POSTERIOR, linestyle="-.", linewidth=1.4)
        _line(axes, demo, pseudo, "truth: pseudo-regret", color=LOOKS[demo.settings.policy][0], linewidth=2.4)
        axes.set(
            title="Time-averaged regret per session",
            xlabel="episode t",
            ylabel="Σ regret / Σ sessions, up to t",
            yscale="log",
        )
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.legend(loc="upper right")

    return _png((7.4, 3.9), draw)


def revenue(demo: Demo) -> bytes:
    """Draw the revenue of every episode and the oracle's, and the share of both."""
    rows, colour = demo.rows, LOOKS[demo.settings.policy][0]
    oracle = np.array([row.score.oracle for row in rows])
    served = np.array([row.score.served for row in rows])
    earned = np.array([row.episode.reward for row in rows])

    def draw(figure: Figure) -> None:
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(1.6, 1.0))
        _episode_axis(upper, demo, label=0.03)
        upper.scatter(_episodes(rows), earned, s=11, color=FAINT, label="earned", zorder=2)
        _line(upper, demo, oracle, "oracle (expected)", color=ORACLE, linestyle="--", linewidth=1.3)
        _line(upper, demo, served, "served (expected)", color=colour, linewidth=1.8)
        upper.set(title="Revenue per episode", ylabel="revenue", ylim=(0, None))
        upper.legend(loc="lower right", ncols=3)
        _episode_axis(lower, demo)
        share = served / np.where(oracle > 0, oracle, 1.0)
        lower.axhline(1.0, color=ORACLE, linestyle="--", linewidth=1.0)
        lower.axhline(0.97, color=FAINT, linestyle=":", linewidth=1.2)
        lower.annotate(
            "97 %", (1.005, 0.97), xycoords=("axes fraction", "data"), fontsize=8, color="#888888", va="center"
        )
        _line(lower, demo, share, "served", color=colour)
        lower.set(title="Served, as a share of the oracle's", xlabel="episode t")
        lower.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")

    return _png((7.4, 5.4), draw)


def clicks(demo: Demo) -> bytes:
    """Draw the click rate by position, early and late."""
    early, late = tenths(demo.rows)

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        positions = np.arange(1, demo.settings.horizon + 1)
        for rows, offset, colour, label in (
            (early, -0.2, FAINT, "first tenth of the episodes"),
            (late, 0.2, LOOKS[demo.settings.policy][0], "last tenth"),
        ):
            seen = np.sum([row.score.answered for row in rows], axis=0)
            hits = np.sum([row.score.clicked for row in rows], axis=0)
            rate = hits / np.maximum(1, seen)
            error = SURE * np.sqrt(rate * (1 - rate) / np.maximum(1, seen))
            axes.bar(positions + offset, rate, width=0.38, color=colour, label=label)
            axes.errorbar(positions + offset, rate, error, fmt="none", ecolor=DARK, elinewidth=0.8, capsize=2)
        axes.set(title="Click rate by position", xlabel="position h", ylabel="clicks / answered displays")
        axes.set_xticks(positions)
        axes.grid(axis="x", visible=False)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        axes.legend(loc="upper left")

    return _png((7.4, 3.6), draw)


def exploration(demo: Demo) -> bytes:
    """Draw the share of sessions that explored, and the share allowed to."""
    rows = demo.rows
    sessions = np.maximum(1.0, [row.score.sessions for row in rows])
    explored = np.array([row.episode.explored for row in rows])
    allowed = np.array([row.allowed for row in rows])

    def draw(figure: Figure) -> None:
        colour = LOOKS[demo.settings.policy][0]
        budget = has_budget(demo)
        left, *others = figure.subplots(1, 2, width_ratios=(1.5, 1.0)) if budget else [figure.subplots()]
        _episode_axis(left, demo, label=0.3)
        left.plot(_episodes(rows), explored / sessions, "o", markersize=3.4, color=colour, label="explored")
        left.set(
            title="Sessions that explored",
            xlabel="episode t",
            ylabel="share of the sessions",
            ylim=(0, min(1.02, 1.15 * max(0.1, float((explored / sessions).max())))),
        )
        left.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        if budget:
            _line(left, demo, allowed / sessions, "budget M / N", color=DARK, linewidth=1.2)
            (right,) = others
            right.fill_between(
                _episodes(rows), 0.95 * np.cumsum(allowed), 1.05 * np.cumsum(allowed), color="#eeeeee", label="± 5 %"
            )
            _line(right, demo, np.cumsum(allowed), "budget", color=DARK, linewidth=1.2)
            _line(right, demo, np.cumsum(explored), "explored", color=colour)
            right.set(title="Cumulative", xlabel="episode t", ylabel="sessions", ylim=(0, None))
            right.legend(loc="lower right")
        left.legend(loc="upper right")

    return _png((7.4, 3.6), draw)


def estimates(demo: Demo) -> bytes:
    """Draw the final estimates and the truth."""
    belief, truth, rewards = demo.parameters.model, demo.world.truth, demo.world.rewards
    order = np.argsort(rewards, kind="stable")

    def draw(figure: Figure) -> None:
        left, right = figure.subplots(1, 2, width_ratios=(2.2, 1.0))
        labels = [f"{demo.arms[k].arm}\n{rewards[k]:.2f}" for k in order]
        _against_truth(left, belief.biases[order], belief.bias_deviations[order], truth.biases[order], labels)
        left.set(title="Arms, by rising revenue", xlabel="arm and its revenue per click", ylabel="log-odds at x = 0")
        names = [f"x{i}" for i in range(1, belief.dim + 1)]
        _against_truth(right, belief.effects, belief.effect_deviations, truth.effects, names)
        right.set(title="Context", xlabel="feature", ylabel="weight")
        left.legend(loc="best")

    return _png((9.4, 4.0), draw)


def _against_truth(axes: Axes, estimate: Floats, deviation: Floats, truth: Floats, labels: Sequence[str]) -> None:
    x = np.arange(len(truth))
    axes.errorbar(
        x,
        estimate,
        SURE * deviation,
        fmt="o",
        color=LOOKS["ucbbp"][0],
        markersize=4.5,
        capsize=3,
        elinewidth=1.3,
        label="estimate, 95 %",
    )
    axes.scatter(x, truth, marker="_", s=170, color=TRUTH, linewidth=2.2, label="truth", zorder=3)
    every = -(-len(labels) // MOST_LABELS)
    axes.set_xticks(x[::every], labels[::every], fontsize=8)
    axes.grid(axis="x", visible=False)
