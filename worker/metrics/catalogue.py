"""The catalogue of metrics: name, kind, help text, the way to read it, and the closed sets of label values.

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
from collections import Counter
from collections.abc import Callable
from typing import Final

import numpy as np

from worker import __version__
from worker.metrics.exposition import MetricSpec, Reading, counter, gauge, histogram
from worker.metrics.history import STAGES, Snapshot
from worker.stream.accounts import ROWS
from worker.stream.calibration import SESSIONS
from worker.stream.events import DEAD_LETTER_REASONS, MODES, ComparedOutcome, Interval
from worker.stream.lift import GROUPS, OUTCOMES
from worker.stream.parameters import Parameters
from worker.stream.session import ENDINGS
from worker.stream.troubles import LEVELS, TROUBLES

#: Positions with a label of their own; later ones share "more", so that the set is closed for any horizon.
MOST_POSITIONS: Final = 20
POSITIONS: Final = (*map(str, range(1, MOST_POSITIONS + 1)), "more")
IDENTITIES: Final = ("arrivals", "sessions", "feedback")
CONSUMED: Final = ("arrivals", "clicks", "journal", "parameters")
#: The label `arm` has the ads of the catalogue: those with the highest revenue, if there are more.
MOST_ADS: Final = 200
AN_AD: Final = ("an ad of the catalogue",)


# ── ways to read ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _newest(read: Callable[[Parameters], Reading]) -> Callable[[Snapshot], Reading]:
    """Read a figure of the newest version, if there is one."""
    return lambda snapshot: None if snapshot.parameters is None else read(snapshot.parameters)


def _by_class(name: str, text: str, **counts: str) -> MetricSpec:
    """Declare a counter by class; each class has the name of its count in the tally."""

    def read(snapshot: Snapshot) -> Reading:
        return {label: getattr(snapshot.now.tally, count) for label, count in counts.items()}

    return counter(name, text, read, **{"class": tuple(counts)})


def _of_ads(name: str, text: str) -> MetricSpec:
    """Declare a sum of the ads with the highest revenue."""

    def read(parameters: Parameters) -> Reading:
        sums = dict(zip(ROWS, parameters.accounts.total.of(len(parameters.arms)), strict=True))
        shown = np.argsort(-sums["revenue"], kind="stable")[:MOST_ADS].tolist()
        return {parameters.arms[k].arm: sums[name][k] for k in shown}

    return counter(f"adcascade_ad_{name}_total", text, _newest(read), arm=AN_AD)


def _compared(parameters: Parameters) -> dict[str, ComparedOutcome]:
    """Return the comparisons with the control group by outcome, as far as they are known."""
    lift = parameters.lift
    known = {} if lift is None else {outcome: lift.compare(outcome) for outcome in OUTCOMES}
    return {outcome: compared for outcome, compared in known.items() if compared is not None}


def _interval(parameters: Parameters) -> Reading:
    return {
        (outcome, bound): value
        for outcome, compared in _compared(parameters).items()
        if compared.relative is not None
        for bound, value in compared.relative._asdict().items()
    }


def _sizes(parameters: Parameters) -> Reading:
    return None if parameters.lift is None else dict(zip(GROUPS, parameters.lift.groups[:, 0].tolist(), strict=True))


def _clicks(snapshot: Snapshot) -> Reading:
    """Read the clicks by position; those beyond `MOST_POSITIONS` share the last label."""
    counts = Counter(dict.fromkeys(POSITIONS[: snapshot.horizon], 0))
    for position, count in snapshot.now.tally.clicks.items():
        counts[str(position) if position <= MOST_POSITIONS else POSITIONS[-1]] += count
    return counts


def _troubles(snapshot: Snapshot) -> Reading:
    active = {trouble.name for trouble in snapshot.troubles}
    return {(name, kind.level): name in active for name, kind in TROUBLES.items()}


# ── the metrics ──────────────────────────────────────────────────────────────────────────────────────────────────────

#: Metrics of learning, traffic and speed, in the order of /metrics.
CATALOGUE: Final = (
    # Regret and revenue.
    counter(
        "adcascade_pseudo_regret_total",
        "Simulated traffic only. Expected revenue of the best slates minus that of the served slates, under the true "
        "model. Exact, without the randomness of clicks.",
        "numbers.pseudo_regret",
    ),
    counter(
        "adcascade_oracle_reward_total",
        "Simulated traffic only. Expected revenue of the best slates for the same sessions, under the true model.",
        "numbers.oracle",
    ),
    counter(
        "adcascade_regret_bound_total",
        "Sum of the optimistic gaps of all sessions in closed windows: an upper bound on the regret at the confidence "
        "of beta, if the model is right. Not an estimate of it.",
        "numbers.regret_bound",
    ),
    counter(
        "adcascade_regret_posterior_total",
        "Sum of the regret expected under the posterior, of all sessions in closed windows: an estimate, not a bound. "
        "It tends to be too high if the model is right, and is far too low if it is not.",
        "numbers.regret_posterior",
    ),
    counter(
        "adcascade_reward_total", "Revenue of the clicks, at the prices of the newest version.", "now.tally.reward"
    ),
    counter(
        "adcascade_expected_reward_total",
        "Revenue of the opened sessions as predicted by the serving versions. It exceeds the earned revenue if users "
        "send no feedback, or if the model overestimates the clicks.",
        "now.tally.expected_reward",
    ),
    # Ads: the accounts of the newest version, the same in every worker.
    counter(
        "adcascade_ad_sessions_total",
        "Sessions of all closed windows, which the metrics of ads are of. These count since the first start, through "
        "restarts, and are the same in every worker: take the maximum over workers, not the sum.",
        "parameters.accounts.total.sessions",
    ),
    _of_ads("displays", f"Displays of an ad, of the {MOST_ADS} ads with most revenue."),
    _of_ads("clicks", "Clicks on an ad."),
    _of_ads("revenue", "Revenue of an ad, at the prices of the serving versions."),
    _of_ads("answered", "Displays of an ad that got a click or a pass."),
    _of_ads("explored", "Displays of an ad with mode explore, random or warmup, which learn."),
    # The control group: the comparison of the newest version, the same in every worker.
    gauge(
        "adcascade_lift",
        "What adcascade earns more per session than the control group, relative to it, with the ends of an interval "
        "that holds at all looks. Absent without a control group, and while too little is known.",
        _newest(_interval),
        outcome=OUTCOMES,
        bound=Interval._fields,
    ),
    gauge(
        "adcascade_lift_per_session",
        "Revenue, or clicks, per session of either group.",
        _newest(lambda version: {(o, g): getattr(one, g) for o, one in _compared(version).items() for g in GROUPS}),
        outcome=OUTCOMES,
        group=GROUPS,
    ),
    gauge(
        "adcascade_lift_sessions",
        "Sessions that were compared.",
        _newest(_sizes),
        group=GROUPS,
    ),
    gauge("adcascade_guarded", "1 while the guardrail stops exploration, otherwise 0.", "parameters.guarded"),
    # Exploration.
    counter(
        "adcascade_explored_sessions_total",
        "Sessions in closed windows, each weighted by its share of positions with mode explore: chosen with a bonus "
        "for uncertain arms (epsilon-greedy: drawn at random). The arm may be the best one without the bonus, too.",
        "numbers.explored_sessions",
    ),
    gauge(
        "adcascade_explore_budget",
        "Number M_t of sessions that may explore in the next window. It limits the policy aucbbp only.",
        "parameters.explore_budget",
    ),
    # Whether the model is right.
    counter(
        "adcascade_predicted_clicks_total",
        "Clicks that the version before each closed window predicted, by sessions: with ads that the policy chose, "
        "with random slates, and of the control group. Chosen ads look over-predicted: overestimated ads are chosen.",
        lambda snapshot: dict(zip(SESSIONS, snapshot.clicks[0], strict=True)),
        sessions=SESSIONS,
    ),
    counter(
        "adcascade_observed_clicks_total",
        "Clicks on the same displays.",
        lambda snapshot: dict(zip(SESSIONS, snapshot.clicks[1], strict=True)),
        sessions=SESSIONS,
    ),
    gauge(
        "adcascade_calibration_ratio",
        "Clicks per predicted click, of about the last 5,000 clicks that were learned from, with the ends of its 95 % "
        "interval. The same in every worker.",
        _newest(lambda version: (ratio := version.calibration.ratio) and ratio._asdict()),
        bound=Interval._fields,
    ),
    # Learning.
    counter("adcascade_episodes_closed_total", "Closed windows that had sessions.", "numbers.episodes_closed"),
    counter("adcascade_episode_sessions_total", "Sessions in closed windows.", "numbers.episode_sessions"),
    counter(
        "adcascade_rejected_folds_total",
        "Closed windows without a usable estimate. The previous version stays in force.",
        "numbers.rejected_folds",
    ),
    counter(
        "adcascade_refused_versions_total",
        "Refused versions: unreadable records, or different content under a known version number.",
        "numbers.refused_versions",
    ),
    counter(
        "adcascade_rounded_versions_total",
        "Versions that differ from the published ones by rounding, because they were made on another kind of machine. "
        "The published ones hold.",
        "numbers.rounded_versions",
    ),
    gauge(
        "adcascade_learning", "1 while the learner of this worker runs and reports, otherwise 0.", "numbers.learning"
    ),
    counter(
        "adcascade_late_records_total",
        "Journal records for windows that were already closed, counted when they are read. The model ignores them.",
        "numbers.late_records",
    ),
    gauge("adcascade_frozen", "1 if learning is frozen by command, otherwise 0.", "parameters.frozen"),
    gauge("adcascade_parameters_version", "Number of the newest version of the parameters.", "parameters.version"),
    gauge(
        "adcascade_parameters_timestamp_seconds",
        "Time at which the newest version was made, in event time.",
        _newest(lambda version: version.made_at / 1000),
    ),
    gauge(
        "adcascade_parameters_observations", "Displays that the newest version is fitted to.", "parameters.observations"
    ),
    gauge(
        "adcascade_kept_share",
        "Share of what older sessions have said that the last fold kept. Below 1 when users or ads have changed "
        "(--forgetting auto), or by a fixed share.",
        "parameters.kept",
    ),
    gauge(
        "adcascade_watermark_timestamp_seconds",
        "Event time up to which all partitions are processed.",
        lambda snapshot: snapshot.now.time / 1000 if snapshot.now.time else None,
    ),
    # Traffic, and both sides of its balances.
    counter("adcascade_arrivals_total", "Arrival records read.", "now.tally.arrivals"),
    _by_class(
        "adcascade_arrivals_classified_total",
        "Arrival records by outcome. The classes add up to all arrival records read. Unremembered: answered without "
        "room for the session.",
        opened="opened",
        repeated="repeated",
        unremembered="unremembered",
        dead="dead_arrivals",
    ),
    counter(
        "adcascade_unlisted_values_total",
        "Values in contexts that their declared category does not list. The status page names frequent ones.",
        lambda snapshot: snapshot.now.tally.unlisted.features.total(),
    ),
    gauge(
        "adcascade_open_sessions",
        "Sessions in the table, including ended ones that have not expired.",
        "now.tally.open_sessions",
    ),
    counter(
        "adcascade_sessions_ended_total",
        "Sessions deleted from the table.",
        lambda snapshot: {how: snapshot.now.tally.ended[how] for how in ENDINGS},
        how=ENDINGS,
    ),
    counter(
        "adcascade_sessions_recovered_total",
        "Sessions taken over with a partition or after a restart.",
        "now.tally.recovered",
    ),
    counter("adcascade_sessions_handed_over_total", "Sessions handed over with a partition.", "now.tally.handed_over"),
    counter("adcascade_feedback_received_total", "Feedback records read.", "now.tally.feedback"),
    _by_class(
        "adcascade_feedback_total",
        "Feedback records by outcome. Together with the parked ones they add up to all feedback read or recovered. "
        "Unknown: over HTTP, for a session that was never opened.",
        applied="applied",
        redundant="redundant",
        outside="outside",
        late="late",
        unknown="unknown",
        unremembered="unparked",
        dead="dead_feedback",
    ),
    gauge(
        "adcascade_parked_records",
        "Feedback records that wait for the arrival of their session.",
        "now.tally.parked_records",
    ),
    counter(
        "adcascade_parked_recovered_total",
        "Parked records taken over with a partition or after a restart.",
        "now.tally.recovered_parked",
    ),
    counter(
        "adcascade_parked_handed_over_total",
        "Parked records handed over with a partition.",
        "now.tally.handed_over_parked",
    ),
    gauge(
        "adcascade_accounting_imbalance",
        "Left minus right side of the balance at the last count of the tables. Any value but 0 is a defect. "
        "arrivals = opened + repeated + unremembered + dead; opened + recovered = ended + open + handed over; feedback "
        "+ recovered parked = applied + redundant + late + outside + unknown + unremembered + dead + parked + handed "
        "over parked.",
        "imbalance",
        identity=IDENTITIES,
    ),
    counter(
        "adcascade_decisions_total",
        "Decisions sent, including repeated ones.",
        lambda snapshot: {mode: snapshot.now.tally.decisions[mode] for mode in MODES},
        mode=MODES,
    ),
    counter("adcascade_clicks_total", "Clicked sessions by position of the click.", _clicks, position=POSITIONS),
    counter(
        "adcascade_dead_letters_total",
        "Records written to the dead letters.",
        lambda snapshot: {reason: snapshot.now.tally.dead[reason] for reason in DEAD_LETTER_REASONS},
        reason=DEAD_LETTER_REASONS,
    ),
    gauge(
        "adcascade_trouble",
        "1 while trouble of a kind is active, otherwise 0. Trouble of level bad stops serving or learning, or makes it "
        "wrong.",
        _troubles,
        kind=tuple(TROUBLES),
        level=LEVELS,
    ),
    # Speed.
    histogram(
        "adcascade_decision_duration_seconds",
        "Time to handle the batch of a decision.",
        "now.histograms.decision_duration_seconds",
    ),
    histogram("adcascade_batch_records", "Records per handled batch.", "now.histograms.batch_records"),
    histogram(
        "adcascade_arrival_to_decision_seconds",
        "Time from the arrival of a session to its first decision.",
        "now.histograms.arrival_to_decision_seconds",
    ),
    histogram(
        "adcascade_stage_seconds",
        "Time that the records of one poll and partition spend in each stage, on Kafka only. fetch: from the timestamp "
        "of the oldest until it is fetched. queue: until they are handled. handle: handling, with the other partitions "
        "of the poll. write: until the broker has acknowledged all outputs.",
        "now.histograms.stage_seconds",
        stage=STAGES,
    ),
    gauge("adcascade_consumer_lag_records", "Consumer lag: records not read yet.", "lag", topic=CONSUMED),
    gauge(
        "adcascade_build_info",
        "Versions of adcascade and Python. Always 1.",
        lambda snapshot: {(__version__, platform.python_version()): 1},
        version=(__version__,),
        python=(platform.python_version(),),
    ),
)
