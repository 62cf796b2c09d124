"""The same bits on every x86-64-v3 machine: pin the kernels of numpy and OpenBLAS before numpy is imported.

Both choose their kernels by the processor. A kernel for wider vectors sums in another order, so the last bits differ.
Elsewhere (ARM, older processors), and with another numpy, which brings another OpenBLAS, versions can differ by
rounding: they are the same version all the same (see `worker.stream.versions`). So a version says by what it was made.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

#: One thread: more would sum in another order, and several workers would compete for cores.
THREADS: Final = MappingProxyType(dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1"))
#: The kernels for x86-64-v3, that is AVX2 and FMA, and nothing wider.
X86_64_V3: Final = MappingProxyType({"OPENBLAS_CORETYPE": "Haswell", "NPY_ENABLE_CPU_FEATURES": "X86_V3"})

#: x86-64-v3 by the names of /proc/cpuinfo; `abm` is LZCNT.
_NEEDED: Final = frozenset(["abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"])


def pin(environment: MutableMapping[str, str] = os.environ, processor: Path = Path("/proc/cpuinfo")) -> None:
    """Force one thread, and set what else is not set in the environment; a numpy that is imported already keeps it."""
    environment.update(THREADS)
    for name, value in wanted(processor).items():
        # numpy refuses to be told twice, and a choice by the user counts.
        if name != "NPY_ENABLE_CPU_FEATURES" or "NPY_DISABLE_CPU_FEATURES" not in environment:
            environment.setdefault(name, value)


def hold() -> None:
    """Hold a BLAS that was loaded before `pin` to one thread: for it the environment comes too late."""
    if "numpy" in sys.modules:
        from threadpoolctl import threadpool_limits

        threadpool_limits(limits=1, user_api="blas")


def wanted(processor: Path) -> Mapping[str, str]:
    """Return the variables that pin the kernels; none if the processor cannot run them."""
    try:
        with processor.open(encoding="ascii", errors="replace") as lines:
            flags = next((line for line in lines if line.startswith("flags")), "")
    except OSError:
        return {}
    return X86_64_V3 if set(flags.split()) >= _NEEDED else {}


def fingerprint() -> str:
    """Return what determines the last bits of a sum in this process: numpy, its BLAS, their kernels and threads.

    With the same fingerprint versions are the same to the bit.
    """
    import numpy as np  # after `pin`
    from threadpoolctl import threadpool_info

    config = np.show_config(mode="dicts")
    blas = config["Build Dependencies"]["blas"]
    loaded = [library for library in threadpool_info() if library["user_api"] == "blas"]
    architectures = sorted({str(library.get("architecture")) for library in loaded})
    threads = max((int(library["num_threads"]) for library in loaded), default=1)
    vectors = config["SIMD Extensions"].get("found", [])
    return (
        f"numpy {np.__version__} ({' '.join([platform.machine(), *vectors])}), "
        f"{blas['name']} {blas['version']} ({' '.join([*architectures, f'threads={threads}'])})"
    )
