"""Troubles that an operator should know of: a closed list of kinds, each with what it means and what to do.

All parts of a worker report through this list. `worker.metrics.troubles` counts the reports and writes them to the log;
/metrics, /readyz, the status page and the alert `AdcascadeTrouble` show the kinds that are active. docs/operations.md
explains each kind.

An example says where something happened, how often or by how much. It has nothing that a client has sent, such as a
session id or the name of a field: the log is kept, and /readyz needs no key.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

#: Characters of an example that are kept.
LONGEST_EXAMPLE: Final = 300

LEVELS: Final = ("bad", "warn")


class TroubleKind(NamedTuple):
    """A kind of trouble: its meaning and its remedy, in whole sentences.

    A kind is active after `least` reports within a few minutes, or as long as its cause lasts. A kind with a `share` is
    active only if its reports are also more than this share of all that was counted under the name `of` in the same
    minutes. `bad` trouble stops serving or learning, or makes it wrong; the rest are warnings.
    """

    meaning: str
    remedy: str
    level: Literal["bad", "warn"] = "warn"
    least: int = 1
    share: float = 0.0
    of: Literal["records", "arrivals", "feedback", "sessions"] = "records"


TROUBLES: Final[Mapping[str, TroubleKind]] = {
    # Records that come in.
    "dead-letters": TroubleKind(
        "Records cannot be used and become dead letters, more than 1 % of all.",
        "Correct the client. Over HTTP each answer says what is wrong, and so does the log of serve --record FILE; on "
        "Kafka read the dead letters (adcascade record - --topics dead-letters).",
        least=3,
        share=0.01,
        of="records",
    ),
    "late-arrivals": TroubleKind(
        "Arrivals come so late that their sessions are over. They get decisions, but nothing is learned from them.",
        "Correct the clocks and the units of occurred_at, and write arrivals at once; --lateness can allow some delay.",
        least=3,
        share=0.05,
        of="arrivals",
    ),
    "late-feedback": TroubleKind(
        "Feedback comes too late to count, or without its arrival, more than 5 % of all.",
        "If users take longer, raise --session-timeout; if delivery does, --lateness. Otherwise compare the clocks, "
        "the units of occurred_at, and the session ids and keys of arrivals and feedback.",
        least=3,
        share=0.05,
        of="feedback",
    ),
    "unanswered": TroubleKind(
        "More than three quarters of the sessions end without any feedback. Each counts as a user who left at the "
        "first ad without a click.",
        "Write feedback for passes as well as for clicks, to the clicks topic of this prefix. Where clients can report "
        "clicks only, set --unanswered passed.",
        least=30,
        share=0.75,
        of="sessions",
    ),
    "unanswered-ads": TroubleKind(
        "Ads are shown, but hardly ever get any feedback, neither clicks nor passes: less than a quarter of the usual "
        "share. Slates avoid them.",
        "Check the creative of these ads and how the client reports them, then retire or mend them (adcascade arms).",
    ),
    "calibration": TroubleKind(
        "Users click clearly more or less often than the model predicts: by the last clicks, less than 0.8 or more "
        "than 1.25 times.",
        "Look at `Can the numbers be believed?` on the status page: at the ads and positions that differ most, and at "
        "how clients report these. If a change of the users is behind it, leave --forgetting at auto.",
    ),
    "misfit": TroubleKind(
        "Features matter in a way that the model cannot learn: what it says of its regret is too low.",
        "Declare the cross in the features and run adcascade features apply. If users differ in what they like, begin "
        "again with --model personal (docs/proof.md).",
    ),
    # The control group.
    "loss": TroubleKind(
        "The control group certainly earns more per session than what adcascade chooses.",
        "Look whether predictions hold (status page), and whether clients show the slates and report clicks of both "
        "groups alike. --max-loss stops exploration while the loss lasts; --policy fixed goes back to the order.",
    ),
    "guarded": TroubleKind(
        "The guardrail has stopped exploration: the loss against the control group is certain, and above --max-loss.",
        "Look for the cause of the loss. Exploration goes on by itself once the loss is no longer certain.",
    ),
    "sample-ratio": TroubleKind(
        "The control group has another size than --control-share says, so the lift cannot be believed.",
        "Look for what one group loses: decisions that a client drops, arrivals that are sent again under other ids. "
        "With few users, by user_id, it may be chance.",
    ),
    "unlisted-values": TroubleKind(
        "Contexts have values that their category does not list, more than 5 % of all. To the model they are missing.",
        "Add the values to [features.context] with adcascade features apply, or correct the client. The status page "
        "names those that come often.",
        least=20,
        share=0.05,
        of="arrivals",
    ),
    "split-sessions": TroubleKind(
        "The producers of arrivals and clicks place the same key in different partitions.",
        "Use the same partitioner for both topics.",
        "bad",
    ),
    "wrong-key": TroubleKind(
        "Records have no key, or another key than their session_id.",
        "Write every arrival and every feedback record with its session_id as the key.",
        least=20,
    ),
    "too-large-output": TroubleKind(
        "The outputs of a record may be larger than 1 MiB, which topics take. A dead letter replaces it.",
        "Lower --max-record-bytes, or limit the clients.",
    ),
    "too-many-sessions": TroubleKind(
        "The worker holds as many sessions as it may. Further arrivals get fallback ads and are not learned from.",
        "Add workers or memory, raise --max-open-sessions, or shorten --session-timeout.",
        "bad",
    ),
    # Time.
    "clock": TroubleKind(
        "The clock of this worker disagrees with the time of the broker, the clients or the other workers.",
        "Correct the clock (NTP). Decisions go on; windows close when the clock is right.",
        "bad",
    ),
    "far-future": TroubleKind(
        "The journal has records from far in the future. The learner passes them over.",
        "Find the worker whose clock is wrong, and set message.timestamp.type=LogAppendTime (adcascade topics check).",
    ),
    "watermark-stalled": TroubleKind(
        "The time up to which all partitions are processed stands still. No window closes, so nothing is learned.",
        "Start workers for all partitions. Look at the worker of that partition: its lag, log and clock.",
        "bad",
    ),
    # The learner.
    "learner-down": TroubleKind(
        "The learner of this worker does not run. Serving continues with the present version.",
        "Read the log of the worker. The learner is started again by itself.",
        "bad",
    ),
    "versions-down": TroubleKind(
        "This worker cannot read new versions. Serving continues with the versions that are known.",
        "Look at the brokers and at the rights on the topic `parameters`. The worker tries again by itself.",
        "bad",
    ),
    "late-versions": TroubleKind(
        "Versions come later than the time from which they should serve.",
        "Give the worker that learns a second core, or lengthen --window.",
    ),
    "order-refused": TroubleKind(
        "The learner refused an order.",
        "Correct the order and send it again.",
    ),
    "fold-passed-over": TroubleKind(
        "A journal record could not be read or folded. The learner passed it over.",
        "Check the writers of the journal. If only workers write to it, this is a defect: keep the record.",
    ),
    "task-failed": TroubleKind(
        "A part of the worker that runs in the background failed. It was started again.",
        "This is a defect: keep the log and report it. If it does not end, restart the worker.",
        "bad",
    ),
    "history": TroubleKind(
        "The history of the parameters cannot be written. Serving and learning continue.",
        "Check the topic parameters-history (adcascade topics check) and the learner's right to write to it.",
    ),
    # State.
    "damaged-state": TroubleKind(
        "A value of the session table could not be read. It was skipped.",
        "Check the writers of sessions-changelog. Only workers of one version may write to it.",
    ),
}


@dataclass(slots=True)
class Troubles:
    """Reports by kind: how many, and the last example of each.

    >>> troubles = Troubles()
    >>> troubles.add("wrong-key", "arrivals, partition 3, offset 5: no key")
    >>> [(kind, count) for kind, count, example in troubles]
    [('wrong-key', 1)]
    """

    reports: dict[str, tuple[int, str]] = field(default_factory=dict)

    def add(self, kind: str, example: str, times: int = 1) -> None:
        """Report a trouble of a kind of the list."""
        if kind not in TROUBLES:
            raise ValueError(f"{kind!r} is not a kind of trouble")
        self.reports[kind] = (self.reports.get(kind, (0, ""))[0] + times, example[:LONGEST_EXAMPLE])

    def update(self, other: Troubles) -> None:
        """Add the reports of another."""
        for kind, times, example in other:
            self.add(kind, example, times)

    def __iter__(self) -> Iterator[tuple[str, int, str]]:
        return ((kind, times, example) for kind, (times, example) in self.reports.items())

    def __len__(self) -> int:
        return len(self.reports)
