"""The target: another policy, applied to every session of the log.

The target of a session plans with the changed settings; arms, prices, exclusions, the number of positions and repeats
are those in force at the time. So the evaluation is of a policy that replaces the other one for this session, and not
of one that runs, and learns, from the start. Its estimate is that of the version that served the session, or of one
version from a file. A version from a file that has learned from this log slightly overestimates the target's revenue.

The target has no warm-up, no `random_share` and no control group: the policy alone is evaluated.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Final

from worker.bandit.policies import policy_named
from worker.errors import InputError
from worker.stream.catalogue import align, align_answers, under
from worker.stream.parameters import Parameters

#: Settings by which the policy plans every session.
ALONE: Final[dict[str, Any]] = {"warmup": 0, "random_share": 0.0, "control_share": 0.0, "max_loss": 0.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """The difference between the target and the policy that served."""

    settings: dict[str, Any] = field(default_factory=dict)
    parameters: Parameters | None = None

    def target(self, served: Parameters) -> Parameters:
        """Return the version that plans for the target where this one served."""
        estimate = self.parameters or served
        if served.settings.dim != estimate.settings.dim:
            raise InputError(f"the parameters have dim {estimate.settings.dim}, the log has {served.settings.dim}")
        if served.settings.features != estimate.settings.features:
            raise InputError("the parameters and the log have different features of contexts or ads")
        kept: dict[str, Any] = {"horizon": served.settings.horizon, "repeats": served.settings.repeats}
        changed = replace(estimate.settings, **self.settings, **ALONE, **kept)
        made_for = ("policy", "bonus", "beta", "spread") if policy_named(changed.policy).is_selective else ()
        if any(getattr(changed, name) != getattr(estimate.settings, name) for name in made_for):
            raise InputError(
                f"the policy {changed.policy} under β {changed.beta} needs versions that were made for it: give "
                "--parameters FILE, which adcascade replay LOG --relearn with these settings writes (--output FILE)"
            )
        aligned = replace(
            estimate,
            arms=served.arms,
            model=align(estimate.model, estimate.arms, served.arms, settings=estimate.settings),
            answers=align_answers(estimate, served.arms, estimate.settings),
            guarded=False,
        )
        return under(changed, aligned)
