"""The plot of an experiment, regret over time and users, and the style of all plots.

matplotlib is imported only for a plot, and needs no display (Agg). The colours are those of Okabe and Ito, which are
distinct for every kind of colour vision; each policy has the same colour in every plot.
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from worker.bandit.arrays import Floats
from worker.errors import FailedError, InputError
from worker.simulation.experiment.settings import ExperimentSettings, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")

#: Colour, line and label of each policy.
LOOKS = {
    "ucbbp": ("#0072B2", "-", "UCBBP"),
    "aucbbp": ("#D55E00", "-", "AUCBBP"),
    "greedy": ("#555555", "--", "greedy"),
    "epsilon-greedy": ("#009E73", "-.", "ε-greedy"),
    "myopic-ucb": ("#CC79A7", (0, (5, 1.5, 1, 1.5, 1, 1.5)), "myopic UCB"),
    "random": ("#E69F00", ":", "random"),
    "fixed": ("#56B4E9", (0, (1, 1)), "fixed order"),
}

HEAD, MARGIN = 0.75, 0.12  # inches

STYLE: Any = {  # Any: matplotlib has a type for each key
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.linewidth": 0.8,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.labelcolor": "#333333",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.7,
    "xtick.color": "#555555",
    "ytick.color": "#555555",
    "legend.frameon": False,
    "figure.facecolor": "white",
    # The same plot has the same bytes, and its text can be searched.
    "svg.hashsalt": "adcascade",
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
}


def check_plot(path: str) -> None:
    """Refuse, before any work, a plot that could not be drawn."""
    if Path(path).suffix.lower() not in SUFFIXES:
        raise InputError(f"{path}: the name of a plot must end in {', '.join(SUFFIXES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise FailedError("plots need matplotlib: pip install 'adcascade[lab]'")


# ── the paper's figure ───────────────────────────────────────────────────────────────────────────────────────────────


def plot_regret(runs: Sequence[Run], settings: ExperimentSettings, path: str) -> bytes:
    """Draw time-averaged regret over t and, if there are several N, context-averaged regret over N."""
    users = sorted({one.users for one in runs})
    policies = list(dict.fromkeys(one.policy for one in runs))
    rows = 2 if len(users) > 1 else 1
    with drawing(7.2, 1.0 + 3.5 * rows) as figure:
        panels = figure.subplots(rows, 1, squeeze=False)[:, 0]
        _draw_over_time(panels[0], [one for one in runs if one.users == users[-1]], policies, users[-1], settings)
        if rows == 2:
            _draw_over_users(panels[1], runs, policies, users)
        seeds = len({one.seed for one in runs})
        _head(
            figure,
            f"Regret in the “{settings.environment}” environment",
            f"d = {settings.dim}, K = {settings.arms}, H = {settings.horizon}, T = {settings.episodes} · "
            f"{settings.model}, {settings.estimator}, β = {settings.beta} · mean of {seeds} seeds, band: 10 % to 90 %",
        )
        return rendered(figure, path)


def _draw_over_time(
    axes: Axes, runs: Sequence[Run], policies: Sequence[str], users: int, settings: ExperimentSettings
) -> None:
    episodes = np.arange(1, settings.episodes + 1)
    for policy in policies:
        curves = np.cumsum([one.regret for one in runs if one.policy == policy], axis=1) / episodes
        _band(axes, episodes, curves, policy)
    axes.set(
        title=f"Time-averaged regret, N = {users}",
        xlabel="episode t",
        ylabel="cumulative regret / t",
        xscale="log",
        yscale="log",
        xlim=(1, settings.episodes),
    )
    if settings.warmup > 1:
        axes.axvspan(1, settings.warmup, color="#f2f2f2", zorder=0)
        axes.text(1.03, 0.03, "warm-up", transform=axes.get_xaxis_transform(), color="#888888", fontsize=8)
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 0.06), ncols=2 if len(policies) > 3 else 1)
    _plain_numbers(axes.xaxis, axes.yaxis)


def _draw_over_users(axes: Axes, runs: Sequence[Run], policies: Sequence[str], users: Sequence[int]) -> None:
    for policy in policies:
        totals = {n: [one.cumulative / n for one in runs if one.policy == policy and one.users == n] for n in users}
        _band(axes, np.array(users), np.array([totals[n] for n in users]).T, policy, marker="o", markersize=4)
    axes.set(
        title="Context-averaged regret",
        xlabel="users per episode N",
        ylabel="cumulative regret / N",
        xscale="log",
        yscale="log",
    )
    axes.set_xticks(list(users), [str(n) for n in users])
    axes.minorticks_off()
    _plain_numbers(axes.yaxis)


def _band(axes: Axes, x: Any, curves: Floats, policy: str, **more: Any) -> None:
    colour, line, label = LOOKS[policy]
    low, high = np.quantile(curves, (0.1, 0.9), axis=0)
    axes.fill_between(x, low, high, color=colour, alpha=0.14, linewidth=0)
    axes.plot(x, curves.mean(axis=0), color=colour, linestyle=line, linewidth=1.8, label=label, **more)


# ── shared parts ─────────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def drawing(width: float, height: float, *, dpi: int = 160) -> Iterator[Figure]:
    """Yield a new figure, to be drawn and rendered in the style of all plots within the block; sizes in inches."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.use("Agg")
    with matplotlib.rc_context({**STYLE, "savefig.dpi": dpi}):
        yield Figure(figsize=(width, height), layout="constrained")


def _head(figure: Figure, title: str, under: str) -> None:
    """Write a title and a line below it, and move the panels below both."""
    width, height = figure.get_size_inches()
    left = MARGIN / width
    figure.text(left, 1 - 0.14 / height, title, fontsize=14, fontweight="bold", va="top")
    figure.text(left, 1 - 0.45 / height, under, fontsize=8.5, color="#666666", va="top")
    layout: Any = figure.get_layout_engine()
    layout.set(rect=(left, MARGIN / height, 1 - 2 * left, 1 - (HEAD + MARGIN) / height))


def rendered(figure: Figure, path: str) -> bytes:
    """Return a figure in the format of a path's suffix."""
    suffix = Path(path).suffix.lower()
    # Without a date, so that the same experiment gives the same file.
    undated: dict[str, Any] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(suffix, {})
    stream = io.BytesIO()
    figure.savefig(stream, format=suffix[1:], metadata=undated or None)
    return stream.getvalue()


def _plain_numbers(*scales: Axis) -> None:
    """Mark 1, 2, 5, 10 … on a logarithmic scale, and write 0.2, not 2 × 10⁻¹."""
    from matplotlib.ticker import LogLocator, NullFormatter

    for scale in scales:
        scale.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        scale.set_major_formatter("{x:g}")
        scale.set_minor_formatter(NullFormatter())
