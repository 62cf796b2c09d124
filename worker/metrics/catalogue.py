"""The catalogue of metrics: names, kinds, help texts, and the closed sets of label values.

Three regrets are different things:

- **pseudo-regret**: the expected revenue of the best slates minus that of the served ones, under the true model. Exact,
  and known in simulated traffic only; elsewhere these series are absent.
- **regret bound**: the optimistic gap. The revenue of the best slates if every arm were β standard deviations better
  than estimated, minus the estimated revenue of the served ones. An upper bound at that confidence, not an estimate.
- **posterior regret**: the expected regret under the posterior. An estimate (measured: 0.8 to 6 times the truth), not
  a bound.

The last two hold if the model is right. Where it lacks what users decide by, the posterior regret was a tenth to a
thousandth of the truth (docs/math.md §6), and the bound below it.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

from worker import __version__
from worker.stream.calibration import SESSIONS
from worker.stream.events import DEAD_LETTER_REASONS, MODES, Interval
from worker.stream.lift import GROUPS, OUTCOMES
from worker.stream.session import ENDINGS
from worker.stream.troubles import LEVELS, TROUBLES

#: Positions with a label of their own; later ones share "more", so that the set is closed for any horizon.
MOST_POSITIONS: Final = 20
POSITIONS: Final = (*map(str, range(1, MOST_POSITIONS + 1)), "more")
IDENTITIES: Final = ("arrivals", "sessions", "feedback")
CONSUMED: Final = ("arrivals", "clicks", "journal", "parameters")
#: Counters that need the true model: absent where the traffic is not simulated.
SIMULATED: Final = ("adcascade_pseudo_regret_total", "adcascade_oracle_reward_total", "adcascade_served_value_total")
#: The label `arm` has the ads of the catalogue: those with the highest revenue, if there are more.
MOST_ADS: Final = 200
AN_AD: Final = ("an ad of the catalogue",)
#: The way of a record through a worker on Kafka: to be fetched, to be handled, handling, to be acknowledged.
STAGES: Final = ("fetch", "queue", "handle", "write")


class MetricSpec(NamedTuple):
    """One metric; `labels` holds the values that each label can have."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: Mapping[str, Sequence[str]] = MappingProxyType({})


def _counter(name: str, text: str, **labels: Sequence[str]) -> MetricSpec:
    return MetricSpec(name, "counter", text, labels)


def _gauge(name: str, text: str, **labels: Sequence[str]) -> MetricSpec:
    return MetricSpec(name, "gauge", text, labels)


def _histogram(name: str, text: str, **labels: Sequence[str]) -> MetricSpec:
    return MetricSpec(name, "histogram", text, labels)


#: All metrics, in the order of /metrics.
CATALOGUE: Final = (
    # Regret and revenue.
    _counter(
        "adcascade_pseudo_regret_total",
        "Simulated traffic only. Expected revenue of the best slates minus that of the served slates, under the true "
        "model. Exact, without the randomness of clicks.",
    ),
    _gauge(
        "adcascade_pseudo_regret_per_session",
        "Simulated traffic only. Pseudo-regret of the last closed window, divided by its sessions.",
    ),
    _counter(
        "adcascade_oracle_reward_total",
        "Simulated traffic only. Expected revenue of the best slates for the same sessions, under the true model.",
    ),
    _counter(
        "adcascade_served_value_total",
        "Simulated traffic only. Expected revenue of the served slates, under the true model.",
    ),
    _gauge(
        "adcascade_regret_bound_per_session",
        "Mean optimistic gap per session of the last closed window: an upper bound on the regret at the confidence of "
        "beta, if the model is right. Not an estimate of it.",
    ),
    _counter(
        "adcascade_regret_bound_total",
        "Sum of the optimistic gaps of all sessions in closed windows: an upper bound if the model is right.",
    ),
    _gauge(
        "adcascade_regret_posterior_per_session",
        "Mean regret per session of the last closed window, expected under the posterior: an estimate, not a bound. It "
        "tends to be too high if the model is right, and is far too low if it is not.",
    ),
    _counter(
        "adcascade_regret_posterior_total",
        "Sum of the regret expected under the posterior, of all sessions in closed windows: an estimate, if the model "
        "is right.",
    ),
    _gauge(
        "adcascade_regret_time_averaged",
        "Regret since the process started, divided by the number of closed windows (the paper's R_t / t): pseudo "
        "(simulated traffic only), bound (optimistic gap) or posterior (expected), both if the model is right.",
        kind=("pseudo", "bound", "posterior"),
    ),
    _counter("adcascade_reward_total", "Revenue of the clicks, at the prices of the newest version."),
    _counter(
        "adcascade_expected_reward_total",
        "Revenue of the opened sessions as predicted by the serving versions. It exceeds the earned revenue if users "
        "send no feedback, or if the model overestimates the clicks.",
    ),
    # Ads: the accounts of the newest version, the same in every worker.
    _counter(
        "adcascade_ad_sessions_total",
        "Sessions of all closed windows, which the metrics of ads are of. These count since the first start, through "
        "restarts, and are the same in every worker: take the maximum over workers, not the sum.",
    ),
    _counter("adcascade_ad_displays_total", f"Displays of an ad, of the {MOST_ADS} ads with most revenue.", arm=AN_AD),
    _counter("adcascade_ad_clicks_total", "Clicks on an ad.", arm=AN_AD),
    _counter("adcascade_ad_revenue_total", "Revenue of an ad, at the prices of the serving versions.", arm=AN_AD),
    _counter("adcascade_ad_answered_total", "Displays of an ad that got a click or a pass.", arm=AN_AD),
    _counter(
        "adcascade_ad_explored_total", "Displays of an ad with mode explore, random or warmup, which learn.", arm=AN_AD
    ),
    # The control group: the comparison of the newest version, the same in every worker.
    _gauge(
        "adcascade_lift",
        "What adcascade earns more per session than the control group, relative to it, with the ends of an interval "
        "that holds at all looks. Absent without a control group, and while too little is known.",
        outcome=OUTCOMES,
        bound=Interval._fields,
    ),
    _gauge(
        "adcascade_lift_per_session", "Revenue, or clicks, per session of either group.", outcome=OUTCOMES, group=GROUPS
    ),
    _gauge("adcascade_lift_sessions", "Sessions that were compared.", group=GROUPS),
    _gauge("adcascade_guarded", "1 while the guardrail stops exploration, otherwise 0."),
    # Exploration.
    _gauge(
        "adcascade_explored_share",
        "Share of the positions in the last closed window with mode explore: chosen with a bonus for uncertain arms "
        "(epsilon-greedy: drawn at random). The arm may be the best one without the bonus, too.",
    ),
    _counter(
        "adcascade_explored_sessions_total",
        "Sessions in closed windows, each weighted by its share of positions with mode explore.",
    ),
    _gauge(
        "adcascade_explore_budget",
        "Number M_t of sessions that may explore in the next window. It limits the policy aucbbp only.",
    ),
    _gauge("adcascade_beta", "Width of exploration, in standard deviations."),
    # Whether the model is right.
    _counter(
        "adcascade_predicted_clicks_total",
        "Clicks that the version before each closed window predicted, by sessions: with ads that the policy chose, "
        "with random slates, and of the control group. Chosen ads look over-predicted: overestimated ads are chosen.",
        sessions=SESSIONS,
    ),
    _counter("adcascade_observed_clicks_total", "Clicks on the same displays.", sessions=SESSIONS),
    _gauge(
        "adcascade_calibration_ratio",
        "Clicks per predicted click, of about the last 5,000 clicks that were learned from, with the ends of its 95 % "
        "interval. The same in every worker.",
        bound=("estimate", "low", "high"),
    ),
    _gauge(
        "adcascade_calibration_log_loss",
        "Log loss of the same predictions, relative to that of one rate for all displays: at 1 they tell nothing.",
    ),
    _gauge(
        "adcascade_missed_pairs",
        "Pairs of features that matter together and that the model cannot learn, at most 5. Named on the status page.",
    ),
    # Learning.
    _counter("adcascade_episodes_closed_total", "Closed windows that had sessions."),
    _counter("adcascade_episode_sessions_total", "Sessions in closed windows."),
    _counter(
        "adcascade_rejected_folds_total",
        "Closed windows without a usable estimate. The previous version stays in force.",
    ),
    _counter(
        "adcascade_refused_versions_total",
        "Refused versions: unreadable records, or different content under a known version number.",
    ),
    _counter(
        "adcascade_rounded_versions_total",
        "Versions that differ from the published ones by rounding, because they were made on another kind of machine. "
        "The published ones hold.",
    ),
    _gauge("adcascade_learning", "1 while the learner of this worker runs and reports, otherwise 0."),
    _counter(
        "adcascade_late_records_total",
        "Journal records for windows that were already closed, counted when they are read. The model ignores them.",
    ),
    _gauge("adcascade_frozen", "1 if learning is frozen by command, otherwise 0."),
    _gauge("adcascade_parameters_version", "Number of the newest version of the parameters."),
    _gauge("adcascade_parameters_timestamp_seconds", "Time at which the newest version was made, in event time."),
    _gauge(
        "adcascade_parameters_effective_timestamp_seconds",
        "Event time from which the newest version serves arrivals.",
    ),
    _gauge("adcascade_parameters_observations", "Displays that the newest version is fitted to."),
    _gauge(
        "adcascade_kept_share",
        "Share of what older sessions have said that the last fold kept. Below 1 when users or ads have changed "
        "(--forgetting auto), or by a fixed share.",
    ),
    _gauge("adcascade_parameter_norm", "Euclidean norm of the estimated parameters."),
    _gauge(
        "adcascade_answer_rate_lowest",
        "Lowest share of the displays of an active ad that get a click or a pass. Absent until an ad has 50 displays "
        "without a click, and where it is not learned who goes on.",
    ),
    _gauge(
        "adcascade_unanswered_ads",
        "Active ads with at least 50 displays without a click that hardly ever get any feedback: less than a quarter "
        "of the median share. Their names are on the status page and in the episode records.",
    ),
    _gauge(
        "adcascade_smallest_eigenvalue",
        "Smallest eigenvalue of the precision. At the value of --ridge, nothing is known of some combination of "
        "features and arms: a feature is always 0 (drop it), an arm is never shown, or one-hot features always add up "
        "to 1 (harmless).",
    ),
    _gauge("adcascade_watermark_timestamp_seconds", "Event time up to which all partitions are processed."),
    # Traffic, and both sides of its balances.
    _counter("adcascade_arrivals_total", "Arrival records read."),
    _counter(
        "adcascade_arrivals_classified_total",
        "Arrival records by outcome. The classes add up to all arrival records read. Unremembered: answered without "
        "room for the session.",
        **{"class": ("opened", "repeated", "unremembered", "dead")},
    ),
    _counter(
        "adcascade_unlisted_values_total",
        "Values in contexts that their declared category does not list. The status page names frequent ones.",
    ),
    _gauge("adcascade_open_sessions", "Sessions in the table, including ended ones that have not expired."),
    _counter("adcascade_sessions_ended_total", "Sessions deleted from the table.", how=ENDINGS),
    _counter("adcascade_sessions_recovered_total", "Sessions taken over with a partition or after a restart."),
    _counter("adcascade_sessions_handed_over_total", "Sessions handed over with a partition."),
    _counter("adcascade_feedback_received_total", "Feedback records read."),
    _counter(
        "adcascade_feedback_total",
        "Feedback records by outcome. Together with the parked ones they add up to all feedback read or recovered. "
        "Unknown: over HTTP, for a session that was never opened.",
        **{"class": ("applied", "redundant", "outside", "late", "unknown", "unremembered", "dead")},
    ),
    _gauge("adcascade_parked_records", "Feedback records that wait for the arrival of their session."),
    _counter("adcascade_parked_recovered_total", "Parked records taken over with a partition or after a restart."),
    _counter("adcascade_parked_handed_over_total", "Parked records handed over with a partition."),
    _gauge(
        "adcascade_accounting_imbalance",
        "Left minus right side of the balance at the last count of the tables. Any value but 0 is a defect. "
        "arrivals = opened + repeated + unremembered + dead; opened + recovered = ended + open + handed over; feedback "
        "+ recovered parked = applied + redundant + late + outside + unknown + unremembered + dead + parked + handed "
        "over parked.",
        identity=IDENTITIES,
    ),
    _counter("adcascade_decisions_total", "Decisions sent, including repeated ones.", mode=MODES, position=POSITIONS),
    _counter("adcascade_clicks_total", "Clicked sessions by position of the click.", position=POSITIONS),
    _counter(
        "adcascade_replanned_sessions_total",
        "Sessions that were planned again after a partition was taken over, while a version was late: the user may "
        "have seen another slate. They are answered, marked uncertain in the journal, and not learned from.",
    ),
    _counter("adcascade_dead_letters_total", "Records written to the dead letters.", reason=DEAD_LETTER_REASONS),
    _counter("adcascade_troubles_total", "Reports of trouble, by kind.", kind=tuple(TROUBLES)),
    _gauge(
        "adcascade_trouble",
        "1 while trouble of a kind is active, otherwise 0. Trouble of level bad stops serving or learning, or makes it "
        "wrong.",
        kind=tuple(TROUBLES),
        level=LEVELS,
    ),
    # Speed.
    _histogram("adcascade_decision_duration_seconds", "Time to handle the batch of a decision."),
    _histogram("adcascade_batch_records", "Records per handled batch."),
    _histogram("adcascade_arrival_to_decision_seconds", "Time from the arrival of a session to its first decision."),
    _histogram(
        "adcascade_stage_seconds",
        "Time that the records of one poll and partition spend in each stage, on Kafka only. fetch: from the timestamp "
        "of the oldest until it is fetched. queue: until they are handled. handle: handling, with the other partitions "
        "of the poll. write: until the broker has acknowledged all outputs.",
        stage=STAGES,
    ),
    _gauge("adcascade_consumer_lag_records", "Consumer lag: records not read yet.", topic=CONSUMED),
    _gauge(
        "adcascade_build_info",
        "Versions of adcascade and Python. Always 1.",
        version=(__version__,),
        python=(platform.python_version(),),
    ),
)
