"""The first writer has the page, until it sends it, goes, or takes too long."""

from collections.abc import Iterator

import pytest

from pie.page.events import Part
from pie.pool.claims import Claims
from pie.pool.conformance import sample_key
from pie.pool.tier import PageId

PAGE = PageId(sample_key(1), Part.FULL)


@pytest.fixture
def claims() -> Iterator[Claims]:
    """Claims that last 5 s, at most 10."""
    claims = Claims(5.0, limit=10)
    yield claims
    claims.check()


def test_the_first_writer_wins(claims: Claims) -> None:
    assert claims.take(PAGE, b"a", 0)
    assert not claims.take(PAGE, b"b", 1)
    assert claims.is_taken(PAGE, 1)


def test_a_sent_page_is_free(claims: Claims) -> None:
    claims.take(PAGE, b"a", 0)
    claims.end(PAGE)
    assert claims.take(PAGE, b"b", 1)


def test_a_writer_that_goes_leaves_its_pages_to_others(claims: Claims) -> None:
    claims.take(PAGE, b"a", 0)
    claims.writer_gone(b"a")
    assert claims.take(PAGE, b"b", 1)


def test_a_writer_that_takes_too_long_loses_its_claim(claims: Claims) -> None:
    claims.take(PAGE, b"a", 0)
    assert not claims.is_taken(PAGE, 5)
    assert claims.take(PAGE, b"b", 5)


def test_asking_again_renews_a_claim(claims: Claims) -> None:
    claims.take(PAGE, b"a", 0)
    assert claims.take(PAGE, b"a", 4)
    assert claims.is_taken(PAGE, 8)


def test_claims_are_bounded(claims: Claims) -> None:
    taken = [claims.take(PageId(sample_key(n), Part.FULL), b"a", 0) for n in range(12)]
    assert taken == [True] * 10 + [False] * 2
    assert len(claims) == 10
    assert claims.take(PageId(sample_key(11), Part.FULL), b"a", 6)
