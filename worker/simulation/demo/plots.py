"""The plots of a demo's report. Each function returns a PNG.

`beside` is the same run with the additive model, where there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from worker.bandit.arrays import Floats
from worker.simulation.demo.beside import Beside
from worker.simulation.demo.ledger import Row, totals
from worker.simulation.demo.run import Demo
from worker.simulation.demo.summary import has_budget, heads
from worker.simulation.environments import DigitsTruth, true_heads
from worker.simulation.plots import LOOKS, drawing, rendered
from worker.simulation.worth import tenths

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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


def _line(axes: Axes, run: Demo | Beside, values: Floats, label: str, **more: Any) -> None:
    axes.plot(_episodes(run.rows), values, label=label, **{"linewidth": 1.8, **more})


# ── the plots ────────────────────────────────────────────────────────────────────────────────────────────────────────


def regret(demo: Demo, beside: Beside | None) -> bytes:
    """Draw the time-averaged regrets: the true one, and the two that need no truth."""
    rows = demo.rows
    posterior = _per_session(rows, lambda row: row.episode.regret_posterior)
    bound = _per_session(rows, lambda row: row.episode.regret_bound)

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        _episode_axis(axes, demo, label=0.03)
        if beside is not None and beside.rows:
            _line(axes, beside, _true_regret(beside), "truth: additive model", color=BESIDE, linewidth=2.0)
        _line(axes, demo, _true_regret(demo), f"truth: {_name(demo)}", color=_colour(demo), linewidth=2.4)
        _line(axes, demo, bound, "bound: optimistic gap", color=BOUND, linestyle="--", linewidth=1.4)
        _line(axes, demo, posterior, "estimate: posterior regret", color=POSTERIOR, linestyle="-.", linewidth=1.4)
        axes.set(
            title="Time-averaged regret per session",
            xlabel="episode t",
            ylabel="Σ regret / Σ sessions, up to t",
            yscale="log",
        )
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.legend(loc="upper right")

    return _png((7.4, 3.9), draw)


def _true_regret(run: Demo | Beside) -> Floats:
    return _per_session(run.rows, lambda row: row.score.regret_per_session)


def _colour(demo: Demo) -> str:
    return LOOKS[demo.settings.policy][0]


def _name(run: Demo | Beside) -> str:
    return f"{run.settings.model} model"


def revenue(demo: Demo, beside: Beside | None) -> bytes:
    """Draw the revenue of every episode and the oracle's, and the share of both."""
    rows, colour = demo.rows, _colour(demo)
    oracle, served = _revenues(demo)
    earned = np.array([row.episode.reward for row in rows])

    def draw(figure: Figure) -> None:
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(1.4, 1.2))
        _episode_axis(upper, demo, label=0.03)
        upper.scatter(_episodes(rows), earned, s=11, color=FAINT, label="earned", zorder=2)
        _line(upper, demo, oracle, "oracle", color=ORACLE, linestyle="--", linewidth=1.3)
        _line(upper, demo, served, _name(demo), color=colour)
        _episode_axis(lower, demo)
        lower.axhline(1.0, color=ORACLE, linestyle="--", linewidth=1.0)
        lower.axhline(GOOD, color=FAINT, linestyle=":", linewidth=1.2)
        _at_the_end(lower, GOOD, f"{GOOD:.0%}", "#888888")
        if beside is not None and beside.rows:
            _line(upper, beside, _revenues(beside)[1], _name(beside), color=BESIDE, linewidth=1.5)
            _line(lower, beside, _share(beside), _name(beside), color=BESIDE, linewidth=1.5)
            last = totals(tenths(beside.rows)[1]).share
            _at_the_end(lower, last, f"{last:.0%}", BESIDE)
        _line(lower, demo, _share(demo), _name(demo), color=colour)
        upper.set(title="Revenue per episode", ylabel="revenue", ylim=(0, None))
        upper.legend(loc="lower right", ncols=4)
        lower.set(title="Served, as a share of the oracle's", xlabel="episode t")
        lower.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")

    return _png((7.4, 5.6), draw)


def _revenues(run: Demo | Beside) -> tuple[Floats, Floats]:
    return np.array([row.score.oracle for row in run.rows]), np.array([row.score.served for row in run.rows])


def _share(run: Demo | Beside) -> Floats:
    return np.array([row.score.share for row in run.rows])


def _at_the_end(axes: Axes, height: float, text: str, colour: str) -> None:
    place: Any = ("axes fraction", "data")
    axes.annotate(text, (1.005, height), xycoords=place, fontsize=8, color=colour, va="center")


def tastes(demo: Demo, beside: Beside | None) -> bytes:
    """Draw which kinds of users get which ads: early, late, as the truth would have it, and beside it."""
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

    def draw(figure: Figure) -> None:
        grid = figure.subplots(1, len(panels), sharey=True)
        for axes, (title, shares, right) in zip(grid, panels, strict=True):
            _heat(axes, shares[:, columns])
            note = "" if right is None else f"{right:.0%} of each user's best ads"
            axes.set_title(f"{title}\n", fontsize=10)
            axes.text(0, 1.02, note, transform=axes.transAxes, fontsize=8.5, color="#555555", va="bottom")
            axes.set_xticks(range(len(columns)), [demo.arms[k].arm for k in columns], rotation=90, fontsize=8)
            axes.set_xlabel("ad in the slate")
        grid[0].set_yticks(range(len(demo.kinds.names)), demo.kinds.names, fontsize=8.5)
        grid[0].set_ylabel("users, by their strongest feature" if demo.settings.environment != "digits" else "users")

    return _png((3.0 * len(panels) + 0.6, 0.26 * len(demo.kinds.names) + 1.9), draw)


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
        axes.text(
            column, row, f"{100 * share:.0f}", ha="center", va="center", fontsize=7, color="w" if share > 0.5 else DARK
        )


def clicks(demo: Demo, beside: Beside | None) -> bytes:
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


def exploration(demo: Demo, beside: Beside | None) -> bytes:
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


def estimates(demo: Demo, beside: Beside | None) -> bytes:
    """Draw the final estimates and the truth: of each ad for the average user, and of tastes."""
    found, deviations = heads(demo.parameters)
    rewards, known = demo.world.rewards, len(demo.world.rewards)
    truth = demo.world.truth
    order = np.argsort(rewards, kind="stable")

    def draw(figure: Figure) -> None:
        left, right = figure.subplots(1, 2, width_ratios=(1.5, 1.0))
        labels = [f"{demo.arms[k].arm}\n{rewards[k]:.2f}" for k in order]
        _against_truth(left, found[order, 0], deviations[order, 0], truth.biases[order], labels)
        left.set(title="Arms, by rising revenue", xlabel="arm and its revenue per click", ylabel="log-odds at x = 0")
        left.legend(loc="best")
        if isinstance(truth, DigitsTruth):
            right.set_visible(False)  # no coefficients: the truth is not linear in the pixels
            return
        _scattered(right, true_heads(truth)[:, 1:].ravel(), found[:known, 1:].ravel(), deviations[:known, 1:].ravel())
        right.set(title="Effects of features, of every ad", xlabel="truth", ylabel="estimate, 95 %")

    return _png((9.4, 4.2), draw)


def _scattered(axes: Axes, truth: Floats, estimate: Floats, deviation: Floats) -> None:
    if len(truth) > MOST_DOTS:
        chosen = np.linspace(0, len(truth) - 1, MOST_DOTS).astype(int)
        truth, estimate, deviation = truth[chosen], estimate[chosen], deviation[chosen]
    limit = 1.1 * max(1e-3, float(np.abs(np.concatenate([truth, estimate])).max()))
    axes.plot([-limit, limit], [-limit, limit], color=TRUTH, linewidth=1.4, zorder=1)
    axes.errorbar(
        truth, estimate, SURE * deviation, fmt="o", color=LOOKS["ucbbp"][0], markersize=3.4, elinewidth=0.7, alpha=0.75
    )
    axes.set(xlim=(-limit, limit), ylim=(-limit, limit))


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
