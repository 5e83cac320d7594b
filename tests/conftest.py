"""What holds for every test: no hub, no telemetry, a fair share of the cores, and no process left behind."""

import contextlib
import os
import uuid
from collections.abc import Iterator

import psutil
import pytest
from hypothesis import HealthCheck, settings

from pie.cluster.ray_environment import SPIN_COUNT

pytest_plugins = [
    "tests.support.redis_deployments",
    "tests.support.redis_server",
    "tests.support.s3_server",
]

# Set before any test imports a library that reads it, and inherited by every process that a test starts.
os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    RAY_USAGE_STATS_ENABLED="0",
    TOKENIZERS_PARALLELISM="false",
)
# Two test processes that each take all cores run at a tenth of the speed.
_runners = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
# Threads that spin for each other beside a busy process almost stand still: see docs/design/0013.
os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // _runners)))

# How long examples take, to make or to try, says how busy the machine is.
settings.register_profile("pie", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("pie")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let tests of a group run on one runner.

    pytest-xdist 3.8 names a test's group in a field that pytest 9.2 no longer reads, and spreads groups
    without a word: each runner then starts the group's cluster (pytest-xdist's issue 1386).
    """
    if not getattr(config.option, "loadgroup", False):
        return
    for item in items:
        named: str = getattr(item, "_nodeid", item.nodeid)
        if named != item.nodeid:
            item._id = type(item.id).parse(named)
        grouped = item.get_closest_marker("xdist_group") is not None
        assert not grouped or "@" in item.nodeid, f"the group of {item.nodeid} is lost"


_MARK = "PIE_TEST_RUN"
_GRACE_S = 60.0
"""For processes that are about to end; on a busy machine that takes a while."""


@pytest.fixture(scope="session", autouse=True)
def no_process_is_left_behind() -> Iterator[None]:
    """Fail the run if a process that a test started is still there at its end, and end it.

    A daemon leaves its parent, so descent alone does not find it: whatever was started also carries a mark
    in its environment.
    """
    run = uuid.uuid4().hex
    os.environ[_MARK] = run
    yield
    del os.environ[_MARK]
    _, left = psutil.wait_procs(_started_in(run), timeout=_GRACE_S)
    if left:
        told = "\n".join(f"  {process.pid}: {_command(process)}" for process in left)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=_GRACE_S)
        pytest.fail(f"left behind by tests of this run:\n{told}", pytrace=False)


def _started_in(run: str) -> list[psutil.Process]:
    children = set(psutil.Process().children(recursive=True))
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(_MARK) == run:
                children.add(process)
    children.discard(psutil.Process())
    # Python's own helper lives as long as the test process, by design.
    return [child for child in children if "resource_tracker" not in _command(child)]


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()) or process.name()
    except psutil.Error:
        return "gone"
