from __future__ import annotations

from pie.router.load_told import told_load
from pie.wire.messages import CachedTokens, LoadDecision, LoadSource, Started


def told(*sources: LoadSource, overran: bool = False) -> str:
    return told_load(Started(CachedTokens(), 0, 0, 0, LoadDecision(sources, overran)))


def test_each_tier_with_its_numbers() -> None:
    host = LoadSource("host", 120, 9.84, 1105, chosen=True, loaded_pages=120, took_ms=11.2)
    pool = LoadSource("pool", 8, 102, 73.7, chosen=False)
    assert told(host, pool) == (
        "host;pages=120;load-ms=9.8;compute-ms=1105.0;loaded=120;took-ms=11.2, "
        "pool;pages=8;load-ms=102.0;compute-ms=73.7"
    )


def test_a_load_that_was_given_up() -> None:
    disk = LoadSource("disk", 4, 1, 40, chosen=True, loaded_pages=1, took_ms=80)
    assert told(disk, overran=True).endswith(";loaded=1;took-ms=80.0;overran")


def test_nothing_where_nothing_was_weighed() -> None:
    assert told_load(None) == told_load(Started(CachedTokens(), 0, 0, 0)) == ""


def test_pages_that_lie_here_and_there_make_no_endless_header() -> None:
    host = LoadSource("host", 1, 0.1, 10, chosen=True, loaded_pages=1, took_ms=0.1)
    header = told(*[host] * 1000)
    assert header.endswith(", more;runs=984")
    assert len(header) < 2000
