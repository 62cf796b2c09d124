"""The same bits on every x86-64-v3 machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from tests.embedded.traffic import ARMS, arrivals, deliver, finish, settings
from worker.embedded.runner import Embedded
from worker.errors import FailedError
from worker.kernels import THREADS, X86_64_V3, fingerprint, pin, wanted
from worker.logs.format import LogWriter
from worker.stream.parameters import decode_parameters
from worker.stream.version_records import encode_parameters
from worker.stream.versions import RoundedError, check_same

CPUINFO = Path("/proc/cpuinfo")
FLAGS = "flags\t\t: fpu sse2 ssse3 sse4_1 avx avx2 f16c fma movbe bmi1 bmi2 abm"


def processor(folder: Path, flags: str) -> Path:
    path = folder / "cpuinfo"
    path.write_text(f"processor\t: 0\nmodel name\t: µ\n{flags}\n\nprocessor\t: 1\n{flags}\n")
    return path


@pytest.mark.parametrize("more", ["", " avx512f avx512cd avx512bw avx512dq avx512vl avx512_vnni avx512_fp16"])
def test_every_x86_64_v3_processor_gets_the_same_kernels(tmp_path, more):
    environment: dict[str, str] = {}
    pin(environment, processor(tmp_path, FLAGS + more))
    assert environment == {**THREADS, **X86_64_V3}


@pytest.mark.parametrize("flags", [FLAGS.replace(" fma", ""), "Features\t: fp asimd sve"])
def test_other_processors_keep_their_own(tmp_path, flags):
    environment: dict[str, str] = {}
    pin(environment, processor(tmp_path, flags))
    assert environment == THREADS
    pin(environment, tmp_path / "missing")
    assert environment == THREADS


def test_a_choice_by_the_user_counts_but_for_threads(tmp_path):
    chosen = {"OPENBLAS_CORETYPE": "SkylakeX", "NPY_DISABLE_CPU_FEATURES": "X86_V3"}
    environment = {**chosen, "OPENBLAS_NUM_THREADS": "4", "OMP_NUM_THREADS": "8"}
    pin(environment, processor(tmp_path, FLAGS))
    assert environment == {**THREADS, **chosen}


@pytest.mark.parametrize("first", ["", "import numpy; "])
def test_no_process_has_more_than_one_blas_thread_whatever_was_asked_for_and_loaded_before(first):
    counts = "[pool['num_threads'] for pool in threadpoolctl.threadpool_info()]"
    script = f"{first}import worker, numpy, threadpoolctl; print({counts})"
    environment = {**os.environ, **dict.fromkeys(THREADS, "2")}
    command = [sys.executable, "-c", script]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert set(orjson.loads(ended.stdout)) == {1}


def test_the_tests_run_with_the_pinned_kernels():
    assert fingerprint().startswith(f"numpy {np.__version__} (")
    if wanted(CPUINFO):
        # scikit-learn brings libraries of its own; whatever names its kernel has the pinned one.
        assert "X86_V3), " in fingerprint()
        assert "Haswell" in fingerprint()
        assert "SkylakeX" not in fingerprint()


# ── versions of other kernels ────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Record a short run; return the path of its log and the newest version."""
    path = tmp_path_factory.mktemp("kernels") / "log.jsonl"
    with LogWriter(path) as log:
        runner = Embedded(settings(), ARMS, tap=log)
        deliver(runner, arrivals(300, seconds=60), live=True)
        finish(runner)
    return path, runner.versions.newest


def test_a_version_carries_the_fingerprint_of_its_kernels_outside_of_its_hash(recorded):
    version = recorded[1]
    assert version.folds > 0
    assert version.kernels == fingerprint()
    elsewhere = replace(version, kernels="numpy 9.9.9 (elsewhere)")
    assert (elsewhere.sha256, elsewhere) == (version.sha256, version)
    assert decode_parameters(encode_parameters(elsewhere)).kernels == elsewhere.kernels


def test_a_version_of_other_kernels_that_differs_by_rounding_is_the_same_and_the_reason_is_named(recorded):
    version = recorded[1]
    nudged = replace(version, model=version.model.shifted(0, 1e-12), kernels="numpy 9.9.9 (elsewhere)")
    with pytest.raises(RoundedError, match=r"only by rounding .* made with numpy 9\.9\.9 .*, the other with numpy"):
        check_same(nudged, version)
    with pytest.raises(RoundedError, match=r"only by rounding \([^)]*\)$"):
        check_same(replace(nudged, kernels=version.kernels), version)
    with pytest.raises(FailedError, match="two learners disagree"):
        check_same(replace(nudged, model=version.model.shifted(0, 1e-6)), version)


def replay(path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Replay under the kernels of the oldest x86-64 processors, whatever is pinned."""
    environment = {**os.environ, "OPENBLAS_CORETYPE": "Prescott"}
    command = [sys.executable, "-m", "worker", "replay", str(path), "--verify", *options]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_a_log_verifies_under_other_kernels_up_to_rounding_and_to_the_bit_it_says_why_not(recorded):
    if not wanted(CPUINFO):
        pytest.skip("this processor is not x86-64-v3: no kernel is pinned")
    close = replay(recorded[0])
    assert close.returncode == 0, close.stdout + close.stderr
    assert "equal except for rounding" in close.stdout
    exact = replay(recorded[0], "--tolerance", "0")
    assert exact.returncode == 1
    assert re.search(r"made with numpy .*, the other with numpy .*Haswell", exact.stdout)


def summary_of_a_demo() -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if name not in {*THREADS, *X86_64_V3}}
    command = [sys.executable, "-W", "error", "-m", "worker", "demo", "--episodes", "20", "--report", "none"]
    ended = subprocess.run([*command, "--json", "-"], env=environment, capture_output=True, check=True)
    numbers: dict[str, Any] = orjson.loads(ended.stdout)
    return numbers


def has_golden_bits() -> bool:
    """Return whether the kernels are pinned, and numpy is that of the image."""
    requirements = Path(__file__).parents[1] / "deploy" / "requirements.txt"
    return bool(wanted(CPUINFO)) and f"\nnumpy=={np.__version__} " in requirements.read_text()


def test_the_demo_and_the_run_beside_it_have_the_golden_hashes():
    """The hashes of a machine without AVX-512; the numpy that gives them is the one of deploy/requirements.txt."""
    numbers = summary_of_a_demo()
    assert (numbers["settings"]["model"], numbers["parameters_version"]) == ("personal", 20)
    if has_golden_bits():
        assert numbers["sha256"][:16] == "a287c2dae3f5d700"
        assert numbers["additive"]["sha256"][:16] == "c7460c6d0879db9e"
