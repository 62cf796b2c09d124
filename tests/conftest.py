"""What holds for all tests: no deadlines (machines are noisy), the same examples every time, and two processes.

One process runs the tests on the real broker, which mostly wait, in their order. The other runs everything else.
`pytest -n 0` runs all in one process, with output as it comes (`-s`) and debuggers. With ADCASCADE_THOROUGH=1, tests
marked as thorough run too, and random search looks for new examples.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
from collections.abc import Iterator

import worker  # noqa: F401 - before numpy: it pins the kernels

import pytest  # isort: skip
from hypothesis import HealthCheck, settings  # isort: skip
from xdist.scheduler import LoadScopeScheduling  # isort: skip

THOROUGH = bool(os.environ.get("ADCASCADE_THOROUGH"))
ON_A_BROKER = ("tests/kafka/", "tests/bench/test_kafka.py")

settings.register_profile(
    "adcascade",
    deadline=None,
    derandomize=not THOROUGH,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("adcascade")


class BrokerScheduling(LoadScopeScheduling):  # type: ignore[misc]
    """Give all tests on the broker to one process, and the others file by file."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "broker" if file.startswith(ON_A_BROKER) else file


@pytest.fixture(autouse=True)
def no_log_is_left() -> Iterator[None]:
    """Take away what a command has set up for its log: its stream ends with the test."""
    yield
    root = logging.getLogger()
    for handler in [one for one in root.handlers if type(one) is logging.StreamHandler]:
        root.removeHandler(handler)
        root.setLevel(logging.WARNING)


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> BrokerScheduling:
    """Return the scheduler of the processes."""
    return BrokerScheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the tests on the broker, which take the longest; leave out the thorough ones unless asked for."""
    if not THOROUGH:
        items[:] = [item for item in items if item.get_closest_marker("thorough") is None]
    items.sort(key=lambda item: not item.nodeid.startswith(ON_A_BROKER))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine function in a loop; one that waits for ever ends after a minute."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None

    async def run() -> None:
        async with asyncio.timeout(300):
            await pyfuncitem.obj(
                **{name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
            )

    asyncio.run(run())
    return True
