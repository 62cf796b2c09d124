"""The same bits on every x86-64-v3 machine: pin the kernels of numpy and OpenBLAS before numpy is imported.

Both choose their kernels by the processor. A kernel for wider vectors sums in another order, so the last bits differ.
Then a failover between two kinds of machine looks like two learners that disagree, and a log of one machine does not
verify on the other. Elsewhere (ARM, older processors) versions can differ by rounding (see `worker.stream.versions`).
"""

from __future__ import annotations

import os
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
    """Set what is not set in the environment; no effect on a numpy that is imported already."""
    for name, value in (THREADS | wanted(processor)).items():
        # numpy refuses to be told twice, and a choice by the user counts.
        if name != "NPY_ENABLE_CPU_FEATURES" or "NPY_DISABLE_CPU_FEATURES" not in environment:
            environment.setdefault(name, value)


def wanted(processor: Path) -> Mapping[str, str]:
    """Return the variables that pin the kernels; none if the processor cannot run them."""
    try:
        with processor.open(encoding="ascii", errors="replace") as lines:
            flags = next((line for line in lines if line.startswith("flags")), "")
    except OSError:
        return {}
    return X86_64_V3 if set(flags.split()) >= _NEEDED else {}
