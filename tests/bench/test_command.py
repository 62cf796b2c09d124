import json
import sys

import pytest

from worker.bench import core
from worker.bench.figures import Figure, busy, figures_table, medians, one_blas_thread, peak_memory
from worker.cli.main import main
from worker.errors import FailedError


@pytest.fixture
def quickly(monkeypatch):
    """Measure everything once and small."""
    measure = core.measure
    monkeypatch.setattr(core, "measure", lambda: measure(quick=True))


def test_bench_core_measures_every_figure(quickly, capsys, tmp_path):
    assert main(["bench", "core", "--json", str(tmp_path / "core.json")]) == 0
    result = json.loads((tmp_path / "core.json").read_text())
    assert result["machine"]["blas_threads"] == 1
    assert result["complete"]
    names = [figure["name"] for figure in result["figures"]]
    assert len(names) == core.FIGURES
    assert names[0] == "planning, d=16 K=50 H=5"
    assert sum(name.startswith("planning") for name in names) == 7
    assert sum(name.startswith("closing") for name in names) == 5
    assert sum("personal" in name for name in names) == 6
    assert all(figure["value"] > 0 for figure in result["figures"])
    out = capsys.readouterr().out
    assert "on one thread" in out
    assert all(name in out for name in names)


@pytest.mark.parametrize(("error", "code"), [(FailedError("it is too slow"), 1), (KeyboardInterrupt(), 130)])
def test_a_bench_that_fails_shows_what_it_has_measured(error, code, monkeypatch, capsys, tmp_path):
    def measure():
        yield Figure("fast", 99.0, "×")
        raise error

    monkeypatch.setattr(core, "measure", measure)
    assert main(["bench", "core", "--json", str(tmp_path / "core.json")]) == code
    result = json.loads((tmp_path / "core.json").read_text())
    assert ([figure["name"] for figure in result["figures"]], result["complete"]) == (["fast"], False)
    shown = capsys.readouterr()
    assert "fast" in shown.out
    assert str(error) in shown.err


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


def test_a_busy_machine_is_reported(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr("os.getloadavg", lambda: (8.4, 0.0, 0.0))
    assert busy() == "the machine is busy (load 8.4 on 2 processors): the figures are blurred"
    monkeypatch.setattr("os.getloadavg", lambda: (1.9, 9.0, 9.0))
    assert busy() is None


def test_the_first_round_does_not_count():
    calls = []
    times = medians({"one": lambda: calls.append(1), "two": lambda: calls.append(2)}, rounds=2)
    assert calls == [1, 2, 1, 2, 1, 2]
    assert set(times) == {"one", "two"}


def test_blas_is_held_to_one_thread():
    from threadpoolctl import threadpool_info

    with one_blas_thread() as name:
        assert {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"} == {1}
    assert name


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory_sees_a_large_array():
    before = peak_memory()
    block = bytearray(before)  # as much again as ever was
    block[::4096] = b"x" * len(block[::4096])
    assert peak_memory() > before
