"""Products in which a row depends on that row alone, to the bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from worker.bandit.rows import GROUP, ROWS, TALLEST, in_blocks, product, room, sums_alike
from worker.kernels import wanted

from .beliefs import lawful, seeds

Matrix = NDArray[np.float32]

row_counts = st.one_of(st.integers(1, 60), st.sampled_from([TALLEST - 1, TALLEST, TALLEST + 1, 2 * TALLEST + 9]))
widths = st.one_of(st.integers(1, 40), st.sampled_from([1000, 1024]))


def factors(seed: int, rows: int, length: int, columns: int, dtype: type = np.float32) -> tuple[Matrix, Matrix]:
    generator = np.random.default_rng(seed)
    right = np.zeros((room(columns), length), dtype=dtype)
    right[:columns] = generator.standard_normal((columns, length))
    return generator.standard_normal((rows, length)).astype(dtype), right


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@given(seeds, row_counts, st.sampled_from([1, 2, 7, 8, 33, 153, 320, 321, 561]), widths)
@lawful
def test_a_row_of_a_product_has_the_bits_that_it_has_alone(dtype, seed, rows, length, columns) -> None:
    left, right = factors(seed, rows, length, columns, dtype)
    whole = product(left, right, slice(0, columns))
    chosen = np.random.default_rng(seed).integers(0, rows, 12)
    for row in chosen[:3]:
        assert product(left[row : row + 1], right, slice(0, columns)).tobytes() == whole[row].tobytes()
    assert product(left[chosen], right, slice(0, columns)).tobytes() == whole[chosen].tobytes()


@pytest.mark.parametrize("alike", [True, False])
@given(seeds, row_counts, st.integers(1, 60), st.integers(1, 60), st.data())
@lawful
def test_a_product_is_the_matrix_product_of_the_columns(alike, seed, rows, length, columns, data) -> None:
    left, right = factors(seed, rows, length, columns)
    first = data.draw(st.integers(0, columns - 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("worker.bandit.rows.sums_alike", lambda dtype: alike)
        result = product(left, right, slice(first, columns))
    exact = left.astype(np.float64) @ right[first:columns].astype(np.float64).T
    assert result.shape == exact.shape
    assert result.dtype == np.float32
    np.testing.assert_allclose(result, exact, rtol=1e-4, atol=1e-4)


@given(seeds, st.integers(1, 50), st.integers(1, 60), st.integers(2, 60))
@settings(max_examples=30, deadline=None)
def test_blocks_give_a_row_the_same_bits_wherever_it_stands(seed, rows, length, columns) -> None:
    left, right = factors(seed, rows, length, columns)
    whole = in_blocks(left, right[:columns].T)
    for first in range(min(rows, ROWS)):
        assert in_blocks(left[first:], right[:columns].T).tobytes() == whole[first:].tobytes()


def verdict(kernel: str) -> str:
    environment = {**os.environ, "OPENBLAS_CORETYPE": kernel, "OPENBLAS_NUM_THREADS": "1"}
    script = "import numpy; from worker.bandit.rows import sums_alike; print(sums_alike(numpy.dtype(numpy.float32)))"
    command = [sys.executable, "-c", script]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return ended.stdout.strip()


def test_the_pinned_kernel_makes_tall_products() -> None:
    if not wanted(Path("/proc/cpuinfo")):
        pytest.skip("this processor is not x86-64-v3: no kernel is pinned")
    assert sums_alike(np.dtype(np.float32))
    assert not sums_alike(np.dtype(np.float64))


@pytest.mark.parametrize("kernel", ["SkylakeX", "Sandybridge", "Prescott"])
def test_no_other_kernel_makes_tall_products(kernel) -> None:
    if not wanted(Path("/proc/cpuinfo")):
        pytest.skip("this processor is not x86-64-v3: no kernel is pinned")
    if kernel == "SkylakeX" and "avx512dq" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("the kernel SkylakeX needs AVX-512")
    assert verdict(kernel) == "False"
    assert verdict("Haswell") == "True"


def test_rows_beside_other_edges_would_differ() -> None:
    # Without the zeros around them, the first rows of a tall product have other bits: that is what they are for.
    if not sums_alike(np.dtype(np.float32)):
        pytest.skip("the kernel that is loaded makes no tall products")
    left, right = factors(0, 64, 100, 2 * GROUP)
    bare = np.matmul(right[: 2 * GROUP], left.T).T
    whole = product(left, right, slice(0, 2 * GROUP))
    assert bare[ROWS:-ROWS].tobytes() == whole[ROWS:-ROWS].tobytes()
    assert bare[:ROWS].tobytes() != whole[:ROWS].tobytes()
