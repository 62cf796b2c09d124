"""Values of contexts that a declared category does not list: counted by feature, the frequent ones by name.

Rules that hold in this file:

- Clients decide what the values are. So their number and their length are bounded, whatever is sent.
- A value may say something about a person. Only values that came often are named (`frequent`), and only on the status
  page (docs/security.md); troubles name the feature, which the operator has declared.
"""

from __future__ import annotations

from collections import Counter
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

    A new value for which there is no room takes one from each of the others (Misra and Gries, 1982). So a value whose
    share is above 1/65 stays, for any number of others.

    >>> unlisted = Unlisted()
    >>> unlisted.add("device", "watch", 30)
    >>> unlisted.add("device", "tv")
    >>> unlisted.features["device"], unlisted.frequent("device")
    (31, [('watch', 30)])
    """

    features: Counter[str] = field(default_factory=Counter)
    values: dict[str, Counter[str]] = field(default_factory=dict)

    def add(self, feature: str, value: str, times: int = 1) -> None:
        """Count a value."""
        self.features[feature] += times
        self._count(feature, Counter({value[:LONGEST_VALUE]: times}))

    def update(self, other: Unlisted) -> None:
        """Add the counts of another."""
        self.features.update(other.features)
        for feature, values in other.values.items():
            self._count(feature, values)

    def _count(self, feature: str, values: Counter[str]) -> None:
        counts = self.values.setdefault(feature, Counter())
        counts.update(values)
        if len(counts) > MOST_VALUES:
            excess = sorted(counts.values(), reverse=True)[MOST_VALUES]
            self.values[feature] = counts - Counter(dict.fromkeys(counts, excess))

    def frequent(self, feature: str) -> list[tuple[str, int]]:
        """Return the values of a feature that came often, the most frequent first."""
        return [one for one in self.values.get(feature, Counter()).most_common(MOST_NAMED) if one[1] >= OFTEN]

    def __len__(self) -> int:
        return len(self.features)
