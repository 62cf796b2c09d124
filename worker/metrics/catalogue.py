"""What there is to be told: names, kinds, help texts, and the closed sets of label values."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, Literal, NamedTuple, TypeAlias

from worker import __version__
from worker.stream.events import DEAD_LETTER_REASONS, MODES
from worker.stream.session import ENDINGS

#: Positions that have a label of their own; all beyond share one, so that the set stays closed for any horizon.
MOST_POSITIONS: Final = 20
POSITIONS: Final = (*map(str, range(1, MOST_POSITIONS + 1)), "more")
IDENTITIES: Final = ("arrivals", "sessions", "feedback")
REGRETS: Final = ("pseudo", "bound", "posterior")
CONSUMED: Final = ("arrivals", "clicks", "journal", "parameters")

Kind: TypeAlias = Literal["counter", "gauge", "histogram"]
Labels: TypeAlias = Mapping[str, Sequence[str]]


class Spec(NamedTuple):
    """One metric; `labels` are the values that each label can have."""

    name: str
    kind: Kind
    help: str
    labels: Labels = MappingProxyType({})


#: What there is, in the order of /metrics.
CATALOGUE: Final = (
    # Regret and revenue: the heart of it.
    Spec(
        "adcascade_pseudo_regret_total",
        "counter",
        "Simulated traffic only. Revenue that the slates served fall short of the best slates, both in expectation "
        "under the true model. Exact, free of the luck of clicks.",
    ),
    Spec(
        "adcascade_pseudo_regret_per_session",
        "gauge",
        "Simulated traffic only. Pseudo-regret of the last closed window, divided by its sessions.",
    ),
    Spec(
        "adcascade_oracle_reward_total",
        "counter",
        "Simulated traffic only. Expected revenue of the best slates under the true model, for the sessions that came.",
    ),
    Spec(
        "adcascade_served_value_total",
        "counter",
        "Simulated traffic only. Expected revenue of the slates served under the true model; the oracle's minus this "
        "is the pseudo-regret.",
    ),
    Spec(
        "adcascade_regret_bound_per_session",
        "gauge",
        "Mean optimistic gap of the last closed window: what a session can have lost at the confidence of beta. An "
        "upper bound from the model's own uncertainty, not an estimate of what was lost.",
    ),
    Spec(
        "adcascade_regret_bound_total",
        "counter",
        "Optimistic gaps of all sessions of closed windows, summed.",
    ),
    Spec(
        "adcascade_regret_posterior_per_session",
        "gauge",
        "Mean posterior expected regret of the last closed window: what a session lost on average over all models "
        "still believed possible. An estimate that leans to the high side, not a bound; wrong if the model is.",
    ),
    Spec(
        "adcascade_regret_posterior_total",
        "counter",
        "Posterior expected regret of all sessions of closed windows, summed.",
    ),
    Spec(
        "adcascade_regret_time_averaged",
        "gauge",
        "Regret since the process started, per closed window (the source's R_t / t): pseudo (simulated traffic only), "
        "bound (optimistic gap) or posterior (expected).",
        {"kind": REGRETS},
    ),
    Spec("adcascade_reward_total", "counter", "Revenue of the clicks, at the prices in force."),
    Spec(
        "adcascade_expected_reward_total",
        "counter",
        "Revenue that the serving versions expected of the sessions opened. Above the revenue earned by as much as "
        "users never answer and the estimate is too hopeful.",
    ),
    # Exploration.
    Spec("adcascade_explored_share", "gauge", "Share of the sessions of the last closed window that explored."),
    Spec("adcascade_explored_sessions_total", "counter", "Sessions that explored, each by the share of its positions."),
    Spec("adcascade_explore_budget", "gauge", "Sessions M_t of the coming window that may explore (aucbbp)."),
    Spec("adcascade_beta", "gauge", "Exploration in standard deviations."),
    # Learning.
    Spec("adcascade_episodes_closed_total", "counter", "Windows closed that had sessions."),
    Spec("adcascade_episode_sessions_total", "counter", "Sessions of the windows closed."),
    Spec(
        "adcascade_rejected_folds_total", "counter", "Windows whose fold gave no usable estimate; the old one stands."
    ),
    Spec(
        "adcascade_refused_versions_total",
        "counter",
        "Versions that were refused because the same version is known with another content: two learners disagree.",
    ),
    Spec("adcascade_learning", "gauge", "1 while this worker runs the learner, 0 while another does."),
    Spec("adcascade_late_records_total", "counter", "Journal records that came for windows already closed."),
    Spec("adcascade_frozen", "gauge", "1 while learning is frozen by command."),
    Spec("adcascade_parameters_version", "gauge", "Newest version of the parameters."),
    Spec("adcascade_parameters_timestamp_seconds", "gauge", "When the newest version was made, in the stream's time."),
    Spec(
        "adcascade_parameters_effective_timestamp_seconds",
        "gauge",
        "From which arrivals on the newest version serves, in the stream's time.",
    ),
    Spec("adcascade_parameters_observations", "gauge", "Answered displays that the newest version rests on."),
    Spec("adcascade_parameter_norm", "gauge", "Euclidean norm of the estimate."),
    Spec(
        "adcascade_smallest_eigenvalue",
        "gauge",
        "Smallest eigenvalue of the precision: how much is known in the direction least known.",
    ),
    Spec("adcascade_watermark_timestamp_seconds", "gauge", "Time up to which all partitions are processed."),
    # Traffic, and the left and right sides of its accounts.
    Spec("adcascade_arrivals_total", "counter", "Arrival records read."),
    Spec(
        "adcascade_arrivals_classified_total",
        "counter",
        "What became of arrival records; the classes add up to all that were read.",
        {"class": ("opened", "repeated", "dead")},
    ),
    Spec("adcascade_open_sessions", "gauge", "Sessions in the table, ended ones that are still remembered among them."),
    Spec("adcascade_sessions_ended_total", "counter", "Sessions deleted from the table.", {"how": ENDINGS}),
    Spec("adcascade_sessions_recovered_total", "counter", "Sessions taken over with a partition or after a restart."),
    Spec("adcascade_sessions_handed_over_total", "counter", "Sessions given away with a partition."),
    Spec("adcascade_feedback_received_total", "counter", "Feedback records read."),
    Spec(
        "adcascade_feedback_total",
        "counter",
        "What became of feedback records; with those parked they add up to all that were read and recovered.",
        {"class": ("applied", "redundant", "outside", "late", "dead")},
    ),
    Spec("adcascade_parked_records", "gauge", "Feedback records that wait for the arrival of their session."),
    Spec("adcascade_parked_recovered_total", "counter", "Parked records taken over."),
    Spec("adcascade_parked_handed_over_total", "counter", "Parked records given away."),
    Spec(
        "adcascade_accounting_imbalance",
        "gauge",
        "Left minus right side of the accounts when the tables were last counted; anything but 0 is a defect. "
        "arrivals = opened + repeated + dead; opened + recovered = ended + open + handed over; feedback + recovered "
        "parked = applied + redundant + late + outside + dead + parked + handed over parked.",
        {"identity": IDENTITIES},
    ),
    Spec(
        "adcascade_decisions_total",
        "counter",
        "Decisions sent, repeated ones among them.",
        {"mode": MODES, "position": POSITIONS},
    ),
    Spec("adcascade_clicks_total", "counter", "Sessions clicked, by the position.", {"position": POSITIONS}),
    Spec("adcascade_dead_letters_total", "counter", "Records that could not be used.", {"reason": DEAD_LETTER_REASONS}),
    # Speed.
    Spec("adcascade_decision_duration_seconds", "histogram", "Time in which the batch of a decision was handled."),
    Spec("adcascade_batch_records", "histogram", "Records handled at once."),
    Spec("adcascade_arrival_to_decision_seconds", "histogram", "From a session's arrival to its first decision."),
    Spec("adcascade_consumer_lag_records", "gauge", "Records not read yet.", {"topic": CONSUMED}),
    Spec(
        "adcascade_build_info",
        "gauge",
        "Always 1.",
        {"version": (__version__,), "python": (platform.python_version(),)},
    ),
)

DURATIONS: Final = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
SIZES: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000)
LAGS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
