"""Every prompt token that was computed has one reason, and the right one."""

from __future__ import annotations

from hypothesis import given, strategies as st

from pie.router.misses import Miss, Promise, misses
from pie.wire.messages import (
    CachedTokens,
    LoadDecision,
    LoadSource,
    MissedPages,
    MissReason,
    Started,
)

PAGE = 4


def started(
    cached: int = 0,
    *missed: tuple[MissReason, int],
    at: int = 0,
    sources: tuple[LoadSource, ...] = (),
    overran: bool = False,
) -> Started:
    return Started(
        CachedTokens(device=cached),
        0.0,
        0.0,
        0.0,
        LoadDecision(sources, overran) if sources else None,
        at,
        tuple(MissedPages(reason, pages) for reason, pages in missed),
    )


def reasons(
    prompt_tokens: int, one: Started, promise: Promise | None = None
) -> list[tuple[MissReason, int]]:
    found = misses(prompt_tokens, PAGE, one, promise or Promise())
    return [(miss.reason, miss.tokens) for miss in found]


sources = st.builds(
    LoadSource,
    tier=st.sampled_from(["host", "disk", "pool"]),
    pages=st.integers(1, 6),
    load_ms=st.just(1.0),
    compute_ms=st.just(1.0),
    chosen=st.booleans(),
    loaded_pages=st.integers(0, 6),
)


@given(
    st.integers(1, 60),
    st.data(),
    st.lists(st.tuples(st.sampled_from(MissReason), st.integers(1, 5)), max_size=4),
    st.lists(sources, max_size=3),
    st.integers(0, 12),
    st.integers(0, 12),
    st.integers(0, 12),
)
def test_the_misses_are_just_the_tokens_that_were_not_cached(
    prompt: int,
    data: st.DataObject,
    missed: list[tuple[MissReason, int]],
    loads: list[LoadSource],
    own: int,
    other: int,
    tenant: int,
) -> None:
    cached = data.draw(st.integers(0, prompt - 1))
    at = data.draw(st.integers(0, cached // PAGE))
    one = started(cached, *missed, at=at, sources=tuple(loads))
    found = misses(prompt, PAGE, one, Promise(own, other, tenant))
    position = cached
    for miss in found:
        assert miss.at == position
        assert miss.tokens > 0
        position += miss.tokens
    assert position == prompt


def test_a_new_prompt_was_never_computed_and_ends_with_a_partial_page() -> None:
    assert misses(10, PAGE, started(0, (MissReason.NEVER_COMPUTED, 2)), Promise()) == (
        Miss(0, 8, MissReason.NEVER_COMPUTED),
        Miss(8, 2, MissReason.PARTIAL_PAGE),
    )


def test_of_a_prompt_that_is_held_the_last_token_is_computed() -> None:
    assert reasons(8, started(7)) == [(MissReason.LAST_TOKEN, 1)]
    assert reasons(9, started(8)) == [(MissReason.PARTIAL_PAGE, 1)]


def test_what_the_worker_let_go_was_evicted() -> None:
    one = started(0, (MissReason.EVICTED, 1), (MissReason.NEVER_COMPUTED, 1))
    assert reasons(8, one) == [(MissReason.EVICTED, 4), (MissReason.NEVER_COMPUTED, 4)]


def test_what_the_index_promised_and_the_worker_lacks_was_stale() -> None:
    one = started(4, (MissReason.EVICTED, 1), (MissReason.NEVER_COMPUTED, 1), at=1)
    assert reasons(12, one, Promise(own_pages=2)) == [
        (MissReason.STALE_INDEX, 4),
        (MissReason.NEVER_COMPUTED, 4),
    ]


def test_what_only_another_worker_has_is_that() -> None:
    one = started(0, (MissReason.NEVER_COMPUTED, 2))
    assert reasons(8, one, Promise(other_pages=1)) == [
        (MissReason.OTHER_WORKER, 4),
        (MissReason.NEVER_COMPUTED, 4),
    ]


def test_what_another_tenant_has_is_that() -> None:
    one = started(0, (MissReason.NEVER_COMPUTED, 2))
    assert reasons(8, one, Promise(tenant_pages=2)) == [(MissReason.TENANT, 8)]


def test_a_load_that_looked_slower_is_no_eviction() -> None:
    source = LoadSource("host", 2, 90.0, 10.0, chosen=False)
    one = started(0, (MissReason.EVICTED, 3), sources=(source,))
    assert reasons(12, one) == [(MissReason.LOAD_SLOWER, 8), (MissReason.EVICTED, 4)]


def test_a_load_that_brought_too_little_failed_or_was_late() -> None:
    source = LoadSource("disk", 3, 1.0, 10.0, chosen=True, loaded_pages=1, took_ms=3.0)
    for overran, reason in ((False, MissReason.LOAD_FAILED), (True, MissReason.LOAD_LATE)):
        one = started(4, (MissReason.EVICTED, 3), sources=(source,), overran=overran)
        assert reasons(12, one) == [(reason, 8)]


def test_what_the_pool_was_asked_for_in_vain_is_no_failure() -> None:
    source = LoadSource("pool", 3, 0.0, 10.0, chosen=True)
    one = started(0, (MissReason.NEVER_COMPUTED, 3), sources=(source,))
    assert reasons(12, one) == [(MissReason.NEVER_COMPUTED, 12)]
    assert reasons(12, one, Promise(own_pages=2)) == [
        (MissReason.LOAD_FAILED, 8),
        (MissReason.NEVER_COMPUTED, 4),
    ]


def test_an_opaque_page_is_opaque_whatever_the_index_says() -> None:
    one = started(0, (MissReason.OPAQUE, 1))
    assert reasons(4, one, Promise(own_pages=1)) == [(MissReason.OPAQUE, 4)]
