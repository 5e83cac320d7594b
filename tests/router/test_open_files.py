"""The limit on open files follows the limit on connections."""

import resource
from collections.abc import Iterator

import pytest

from pie.router.open_files import allow_connections

NOFILE = resource.RLIMIT_NOFILE


@pytest.fixture(autouse=True)
def limits() -> Iterator[tuple[int, int]]:
    before = resource.getrlimit(NOFILE)
    yield before
    resource.setrlimit(NOFILE, before)


def test_the_limit_is_raised_as_far_as_connections_need(
    limits: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    _, hard = limits
    resource.setrlimit(NOFILE, (1024, hard))
    allow_connections(100)
    assert resource.getrlimit(NOFILE) == (1024, hard), "it is high enough"
    allow_connections(2_000)
    assert resource.getrlimit(NOFILE) == (2_512, hard)
    assert not caplog.records


def test_where_the_system_allows_fewer_that_is_said(
    limits: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    _, hard = limits
    if hard == resource.RLIM_INFINITY:
        pytest.skip("this system allows any number")
    resource.setrlimit(NOFILE, (1024, hard))
    allow_connections(hard)
    assert resource.getrlimit(NOFILE) == (hard, hard)
    assert f"router.max_connections = {hard}" in caplog.text
