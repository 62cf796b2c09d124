import json
from functools import partial

import pytest

from worker.bench import core, http, stream
from worker.bench.figures import Figure, fastest, figures_table
from worker.cli.main import main

QUICKLY = {
    "core": {"quick": True},
    "stream": {"seconds": 8, "rounds": 1},
    "http": {"seconds": 0.5, "rounds": 1},
}


@pytest.mark.parametrize("name", QUICKLY)
def test_a_bench_measures_every_figure(name, monkeypatch, capsys, tmp_path):
    bench = {"core": core, "stream": stream, "http": http}[name]
    monkeypatch.setattr(bench, "measure", partial(bench.measure, **QUICKLY[name]))
    assert main(["bench", name, "--json", str(tmp_path / "result.json")]) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["machine"]["blas_threads"] == 1
    figures = {figure["name"]: figure for figure in result["figures"]}
    assert len(figures) == {"core": 6, "stream": 4, "http": 6}[name]
    wrong = figures.pop("failed or fallback answers", {"value": 0})
    assert wrong["value"] == 0
    assert all(figure["value"] > 0 for figure in figures.values())
    out = capsys.readouterr().out
    assert "on one thread" in out
    assert all(name in out for name in figures)


def test_the_learner_of_the_bench_folds_every_session():
    learner = stream.fold(stream.closed_journal(stream.record_traffic(8).journal))
    assert learner.windows.sessions == 0
    assert learner.current.observations > 0


def test_bench_needs_an_action_that_exists(capsys):
    assert main(["bench"]) == 2
    assert main(["bench", "everything"]) == 2
    assert capsys.readouterr().err.count("\n") == 2


def test_a_missed_target_is_marked():
    figures = [
        Figure("fast", 99.0, "×", least=100),
        Figure("small", 5.0, "MB", most=10),
        Figure("other", 1.0, "s"),
    ]
    assert [one.met for one in figures] == [False, True, None]
    assert "MISSED" in figures_table(figures).splitlines()[1]


def test_the_first_round_does_not_count():
    calls = []
    times = fastest({"one": lambda: calls.append(1), "two": lambda: calls.append(2)}, rounds=2)
    assert calls == [1, 2, 1, 2, 1, 2]
    assert set(times) == {"one", "two"}
