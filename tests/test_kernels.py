"""The same bits on every x86-64-v3 machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

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
        assert (fingerprint()["simd"], fingerprint()["kernel"]) == ("X86_V3", "Haswell")


def test_the_demo_has_the_golden_hash():
    """The hash of a machine without AVX-512; the numpy that gives it is pinned in pyproject.toml."""
    environment = {name: value for name, value in os.environ.items() if name not in {*THREADS, *X86_64_V3}}
    command = [sys.executable, "-W", "error", "-m", "worker", "demo", "--episodes", "20", "--report", "none"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    sha256 = re.search(r"parameters +v20 +sha256 (\w+)", ended.stdout)
    assert sha256, ended.stdout
    if wanted(CPUINFO):
        assert sha256[1] == "29d126b089fd4787"
