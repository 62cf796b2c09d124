"""`adcascade bench http`, small: every figure is there, and both servers answer everything."""

from __future__ import annotations

import pytest

from worker.bench import http
from worker.bench.figures import Figure


@pytest.mark.slow
def test_bench_http_measures_every_figure():
    figures = {one.name: one for one in http.measure(quick=True) if isinstance(one, Figure)}
    assert len(figures) == http.FIGURES
    assert figures["failed requests"].value == 0
    for name in ("serve", "plain aiohttp, a constant", "answer of serve, p50", "processor time of serve"):
        assert figures[name].value > 0
    assert figures["answer of serve, p50"].value <= figures["answer of serve, p99"].value
