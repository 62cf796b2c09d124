"""Metrics as they are declared, and the series of Prometheus that are made from declarations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias, cast

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from worker.metrics.history import Histogram

#: What a metric is read as: a value, values by label (by several in a tuple), or None if there is none.
Reading: TypeAlias = "float | Histogram | Mapping[Any, float | Histogram] | None"
Kind: TypeAlias = Literal["counter", "gauge", "histogram"]


class MetricSpec(NamedTuple):
    """One metric; `labels` holds the values that each label can have.

    `read` reads it from what a process has counted: a function, or the names of attributes and keys that lead to it.
    """

    name: str
    kind: Kind
    help: str
    read: str | Callable[[Any], Reading]
    labels: Mapping[str, Sequence[str]] = MappingProxyType({})

    def reading(self, source: Any) -> Mapping[Any, float | Histogram]:
        """Return the values by label; none if there is nothing to read."""
        found = self.read(source) if callable(self.read) else _follow(source, self.read)
        return found if isinstance(found, Mapping) else {} if found is None else {(): found}


def _follow(source: Any, names: str) -> Any:
    for name in names.split("."):
        if source is not None:
            source = source.get(name) if isinstance(source, Mapping) else getattr(source, name)
    return source


def _declared(
    kind: Kind, name: str, text: str, read: str | Callable[[Any], Reading], /, **labels: Sequence[str]
) -> MetricSpec:
    return MetricSpec(name, kind, text, read, labels)


#: Declare a metric: its name, its text, how it is read, and the values of its labels.
counter, gauge, histogram = partial(_declared, "counter"), partial(_declared, "gauge"), partial(_declared, "histogram")

_FAMILIES = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}


@dataclass(frozen=True, slots=True, eq=False)
class Series:
    """A collector for a registry of Prometheus: at every scrape, it reads metrics from what `source` returns then."""

    specs: Iterable[MetricSpec]
    source: Callable[[], Any]

    def collect(self) -> Iterator[Metric]:
        """Yield metrics with their series, in the order of their declarations; one without data has no series."""
        source = self.source()
        for spec in self.specs:
            made: Any = _FAMILIES[spec.kind](spec.name, spec.help, labels=list(spec.labels))
            for labels, value in spec.reading(source).items():
                values = [labels] if isinstance(labels, str) else [str(label) for label in labels]
                if isinstance(value, Histogram):
                    made.add_metric(values, value.buckets(), value.sum)
                else:
                    made.add_metric(values, float(value))
            yield cast(Metric, made)
