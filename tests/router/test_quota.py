"""What a tenant may take, against a plain count of what it took."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from pie.router.errors import ApiError
from pie.router.key_file import Tenant
from pie.router.quota import Bucket, Quota

STEPS = st.lists(st.tuples(st.floats(0, 30), st.integers(1, 80)), max_size=60)


@given(STEPS, st.integers(1, 100))
def test_no_minute_gives_more_than_two_minutes_worth_and_waiting_as_told_is_enough(
    steps: list[tuple[float, int]], per_minute: int
) -> None:
    bucket, now_s = Bucket(per_minute, 0.0), 0.0
    taken: list[tuple[float, int]] = []
    for passed_s, amount in steps:
        now_s += passed_s
        asked = min(amount, per_minute)
        wait_s = bucket.wait_s(asked, now_s)
        assert wait_s <= 60.0 + 1e-6
        if wait_s > 0:
            now_s += wait_s * (1 + 1e-9) + 1e-9
            assert bucket.wait_s(asked, now_s) == 0
        bucket.take(asked, now_s)
        taken.append((now_s, asked))
        last_minute = sum(a for at, a in taken if at > now_s - 60)
        assert last_minute <= 2 * per_minute


def test_an_answers_tokens_delay_what_comes_later() -> None:
    quota = Quota("t", Tenant("salt", tokens_per_minute=60), 0.0)
    quota.prompt(10, 0.0)
    quota.answered(80, 0.0)
    with pytest.raises(ApiError) as refused:
        quota.prompt(1, 0.0)
    assert refused.value.headers == {"retry-after": "31"}
    quota.prompt(1, 31.0)


def test_what_is_refused_is_not_counted() -> None:
    quota = Quota("t", Tenant("salt", requests_per_minute=1, concurrent=2), 0.0)
    with pytest.raises(ApiError, match="more than the 2"):
        quota.enter(3, 0.0)
    quota.enter(1, 0.0)
    for at_s in (0.0, 59.0):
        with pytest.raises(ApiError, match="1 requests a minute"):
            quota.enter(1, at_s)
    assert quota.inside == 1
    quota.enter(1, 61.0)
    assert quota.inside == 2


def test_a_changed_limit_keeps_what_was_taken() -> None:
    quota = Quota("t", Tenant("salt", requests_per_minute=2), 0.0)
    quota.enter(1, 0.0)
    quota.limit(Tenant("salt", requests_per_minute=4), 0.0)
    for _ in range(3):
        quota.enter(1, 0.0)
    with pytest.raises(ApiError, match="4 requests a minute"):
        quota.enter(1, 0.0)
    quota.limit(Tenant("salt"), 0.0)
    quota.enter(1, 0.0)
