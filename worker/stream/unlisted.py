"""Values of contexts that a declared category does not list: counted by feature, the frequent ones by name.

Clients decide what the values are, so their number and length are bounded. A value may say something about a person, so
only those that came often are named, and only on the status page (docs/security.md). Troubles name the feature.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

#: Values that are counted of each feature, and the characters that are kept of each.
MOST_VALUES: Final = 64
LONGEST_VALUE: Final = 40
#: Values that are named of each feature, and the count from which on.
MOST_NAMED: Final = 5
OFTEN: Final = 20


@dataclass(slots=True)
class Unlisted:
    """Unlisted values: `features` has the exact count of each feature, `values` lower bounds for the frequent ones.

    Where there are too many, all lose the count of the first that has no room (Misra and Gries, 1982). So a value whose
    share is above 1/65 stays, for any number of others.
    """

    features: Counter[str] = field(default_factory=Counter)
    values: dict[str, Counter[str]] = field(default_factory=dict)

    def add(self, found: Sequence[tuple[str, str]]) -> None:
        """Count the values of a batch, given with their features."""
        batch = Unlisted(Counter(feature for feature, _ in found))
        for feature, value in found:
            batch.values.setdefault(feature, Counter())[value[:LONGEST_VALUE]] += 1
        self.update(batch)

    def update(self, other: Unlisted) -> None:
        """Add the counts of another."""
        self.features.update(other.features)
        for feature, values in other.values.items():
            counts = self.values[feature] = self.values.get(feature, Counter()) + values
            if len(counts) > MOST_VALUES:
                excess = sorted(counts.values(), reverse=True)[MOST_VALUES]
                self.values[feature] = counts - Counter(dict.fromkeys(counts, excess))

    def frequent(self, feature: str) -> list[tuple[str, int]]:
        """Return the values of a feature that came often, the most frequent first."""
        return [one for one in self.values[feature].most_common(MOST_NAMED) if one[1] >= OFTEN]

    def __len__(self) -> int:
        return len(self.features)
