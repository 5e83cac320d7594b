"""A cluster's claim to its index is kept whatever its parts do."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from pie.cluster import claim
from pie.cluster.claim import Claim
from pie.cluster.errors import StartError
from pie.cluster.host import Phase, State
from pie.cluster.launch import Part
from pie.index.client import make_client
from pie.index.settings import IndexSettings
from tests.support.redis_server import index_settings, redis_server, redis_url

__all__ = ["index_settings", "redis_server", "redis_url"]

READY, FAILED = State(Phase.READY, "somewhere"), Phase.FAILED


def until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)


@pytest.mark.live
def test_it_outlives_the_time_of_a_lease_and_ends_when_given_up(
    index_settings: IndexSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claim, "_TTL_S", 2.0)
    monkeypatch.setattr(claim, "_KEEP_S", 0.05)
    url = index_settings.url
    first = Claim(url, index_settings)
    client = make_client(url, index_settings)
    (key,) = client.keys(f"{index_settings.key_prefix}:lease:*")
    end_s = time.monotonic() + 3
    while time.monotonic() < end_s:
        assert client.exists(key)
        time.sleep(0.05)
    first.check()
    first.give_up()
    assert not client.exists(key)
    Claim(url, index_settings).give_up()
    client.close()


@pytest.mark.live
def test_a_second_claim_is_refused_and_one_that_took_over_is_told_of(
    index_settings: IndexSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claim, "_KEEP_S", 0.05)
    client = make_client(index_settings.url, index_settings)
    key = f"{index_settings.key_prefix}:lease:cluster"
    client.set(key, "somebody", ex=60)
    with pytest.raises(StartError, match=r"another cluster \(somebody\) uses this index"):
        Claim(index_settings.url, index_settings)
    client.delete(key)
    first = Claim(index_settings.url, index_settings)
    client.set(key, "somebody", ex=60)
    until(lambda: first._taken_by is not None)
    with pytest.raises(StartError, match="has taken over"):
        first.check()
    first.give_up()
    assert client.get(key) == b"somebody"
    client.close()


def test_a_part_that_was_ready_and_is_silent_for_long_has_failed() -> None:
    part = Part("router-1", lambda: None)  # type: ignore[arg-type,return-value]
    assert part.heard(None, 0.0).phase is Phase.STARTING
    assert part.heard(None, 100.0).phase is Phase.STARTING, "it was never ready"
    part.state = part.heard(READY, 101.0)
    assert part.heard(None, 102.0) == READY
    assert part.heard(None, 116.0) == READY
    assert part.heard(READY, 117.0) == READY
    assert part.heard(None, 118.0) == READY
    assert part.heard(None, 134.0).phase is FAILED
    part.remake()
    assert not part.is_silent
