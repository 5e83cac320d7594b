"""What the processes of a cluster are given in their environment."""

from __future__ import annotations

import os

import pytest

from pie.cluster.ray_environment import SPIN_COUNT, prepare


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        os.environ.pop(name, None)


def test_threads_soon_sleep_at_a_barrier() -> None:
    prepare("")
    assert os.environ["GOMP_SPINCOUNT"] == SPIN_COUNT


@pytest.mark.parametrize("name", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_who_says_how_threads_wait_is_heard(name: str) -> None:
    os.environ[name] = "7"
    prepare("")
    told = {other: os.environ.get(other) for other in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    assert told == {"GOMP_SPINCOUNT": None, "OMP_WAIT_POLICY": None} | {name: "7"}


def test_a_ray_of_ones_own_has_a_token_and_a_running_one_is_joined_without() -> None:
    prepare("10.0.0.1:6379")
    assert os.environ["RAY_AUTH_MODE"] == "disabled"
    prepare("")
    assert os.environ["RAY_AUTH_MODE"] == "token"
    assert len(os.environ["RAY_AUTH_TOKEN"]) == 64
