"""The same bits on every x86-64-v3 machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest

from worker.kernels import THREADS, X86_64_V3, pin, wanted

from .golden.recording import fingerprint

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


def test_a_choice_by_the_user_counts(tmp_path):
    chosen = {"OPENBLAS_CORETYPE": "SkylakeX", "NPY_DISABLE_CPU_FEATURES": "X86_V3", "OPENBLAS_NUM_THREADS": "4"}
    environment = dict(chosen)
    pin(environment, processor(tmp_path, FLAGS))
    assert environment == {**THREADS, **chosen}


def test_the_tests_run_with_the_pinned_kernels():
    if wanted(CPUINFO):
        # scikit-learn brings libraries of its own; whatever names its kernel has the pinned one.
        kernels = set(fingerprint()["kernel"].split()) - {"None"}
        assert (fingerprint()["simd"], kernels) == ("X86_V3", {"Haswell"})


#: What the first release did, as options.
FIRST_RELEASE = (
    *("--environment", "opposite", "--model", "additive", "--no-intercept", "--answers", "all", "--no-standardise"),
    *("--policy", "aucbbp", "--bonus", "value", "--beta", "2.5", "--ridge", "0.5", "--learn-at-most", "0"),
)


def summary_of_a_demo(*options: str) -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if name not in {*THREADS, *X86_64_V3}}
    command = [sys.executable, "-W", "error", "-m", "worker", "demo", "--episodes", "20", "--report", "none"]
    ended = subprocess.run([*command, *options, "--json", "-"], env=environment, capture_output=True, check=True)
    numbers: dict[str, Any] = orjson.loads(ended.stdout)
    return numbers


def test_the_demo_and_the_run_beside_it_have_the_golden_hashes():
    """The hashes of a machine without AVX-512; the numpy that gives them is pinned in pyproject.toml."""
    numbers = summary_of_a_demo()
    assert (numbers["settings"]["model"], numbers["parameters_version"]) == ("personal", 20)
    if wanted(CPUINFO):
        assert numbers["sha256"][:16] == "985ce6f0ccdbd183"
        assert numbers["additive"]["sha256"][:16] == "5ac3e4294f5ab09d"


def test_with_the_settings_of_the_first_release_the_demo_has_the_hash_of_the_first_release():
    numbers = summary_of_a_demo(*FIRST_RELEASE)
    assert numbers["parameters_version"] == 20
    if wanted(CPUINFO):
        assert numbers["sha256"][:16] == "29d126b089fd4787"
