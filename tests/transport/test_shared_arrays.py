"""Arrays that two processes share: the same numbers, read-only, and nothing is left over."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import numpy as np
import pytest

from worker.bandit.arrays import Array
from worker.kafka.shared_arrays import ALIGNMENT, Part, map_parts, write_parts

ARRAYS: dict[str, Array] = {
    "text": np.frombuffer(b'{"a":1}', np.uint8),
    "numbers": np.arange(12.0).reshape(3, 4),
    "none": np.zeros((0, 5)),
    "columns": np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3)),
    "one": np.array(3.5),
    "whole": np.arange(5),
}


@pytest.mark.parametrize("in_memory", [True, False])
def test_arrays_are_what_they_were_and_cannot_be_written(in_memory: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not in_memory:
        monkeypatch.delattr(os, "memfd_create")
    file, parts = write_parts(ARRAYS)
    shared = map_parts(file, parts)
    os.close(file)
    assert shared.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert shared[name].dtype == array.dtype
        assert np.array_equal(shared[name], array)
        assert array.size == 0 or not shared[name].flags.writeable
        assert shared[name].ctypes.data % ALIGNMENT == 0 or not array.size


def test_a_file_in_memory_cannot_be_changed_any_more() -> None:
    file, _ = write_parts(ARRAYS)
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(file, 0)
    with pytest.raises(OSError, match="not permitted"):
        os.pwrite(file, b"x", 0)
    os.close(file)


def test_the_mapping_goes_with_the_last_array() -> None:
    gc.collect()  # what the tests before this one have mapped
    file, parts = write_parts(ARRAYS)
    shared = map_parts(file, parts)
    os.close(file)
    kept = shared["numbers"][1:]
    del shared
    assert "adcascade-version" in Path("/proc/self/maps").read_text(encoding="utf-8")
    assert kept.sum() == sum(range(4, 12))
    del kept
    assert "adcascade-version" not in Path("/proc/self/maps").read_text(encoding="utf-8")


def test_a_part_beyond_the_end_is_an_error_and_not_a_crash() -> None:
    file, _ = write_parts(ARRAYS)
    with pytest.raises(ValueError, match="buffer"):
        map_parts(file, (Part("too long", "<f8", (10**6,), 0),))
    os.close(file)
