"""Facts that follow each other in the journal, taken at once.

Rules that hold in this file:

- `opened`, `feedback` and records that cannot be used change nothing but the open windows and the reports. Among them,
  only the offsets matter, not the order. So all of them up to the next record of another kind are taken at once.
- A record that cannot be used, or that raises, costs itself and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import compress
from typing import Final

from worker.stream.decoding import Rejected
from worker.stream.events import FeedbackFact, JournalEvent, Opened
from worker.stream.windows import OpenWindows

#: What may be among facts.
KINDS: Final = frozenset({Opened, FeedbackFact, Rejected})


class Facts:
    """Facts with their offsets; contexts must have `dim` numbers."""

    def __init__(self, offsets: Sequence[int], events: Sequence[JournalEvent | Rejected], *, dim: int) -> None:
        self.offsets = offsets
        self._events = events
        self._dim = dim

    def __len__(self) -> int:
        return len(self.offsets)

    def __iter__(self) -> Iterator[Facts]:
        for offset, event in zip(self.offsets, self._events, strict=True):
            yield Facts([offset], [event], dim=self._dim)

    def add_to(self, windows: OpenWindows) -> int:
        """Add them to the open windows; return how many are late. After an error they can be added again."""
        events, dim = self._events, self._dim
        opened = [event for event in events if type(event) is Opened and len(event.context) == dim]
        answers = [event for event in events if type(event) is FeedbackFact]
        # Nearly always, of the offsets only the first is asked for.
        late = windows.open_all(
            compress(self.offsets, (type(event) is Opened and len(event.context) == dim for event in events)), opened
        )
        return late + windows.answer_all(
            compress(self.offsets, (type(event) is FeedbackFact for event in events)), answers
        )

    def refused(self) -> Iterator[tuple[str, str]]:
        """Yield the kind of trouble of every record that cannot be used, and its example."""
        for offset, event in zip(self.offsets, self._events, strict=True):
            if type(event) is Rejected:
                kind = "far-future" if event.reason == "future" else "fold-passed-over"
                yield kind, _at(offset, event.reason)
            elif type(event) is Opened and len(event.context) != self._dim:
                error = f"the context has {len(event.context)} numbers, not {self._dim}"
                yield "fold-passed-over", _at(offset, error)


def _at(offset: int, error: str) -> str:
    return f"journal offset {offset}: {error}"
