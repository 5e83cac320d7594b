"""Extents tile the arena, whatever order they come and go in."""

from collections.abc import Iterable

from hypothesis import given, strategies as st

from pie.pool.extents import ALIGN_BYTES, PAGE_BYTES, ExtentAllocator, rounded


def largest_gap(extents: ExtentAllocator, held: Iterable[int]) -> int:
    """Return the size of the largest gap between extents that start so."""
    ends = [0, *(start + extents.size_of(start) for start in sorted(held))]
    return max(
        start - end for start, end in zip([*sorted(held), extents.capacity], ends, strict=True)
    )


@given(st.lists(st.one_of(st.integers(1, 300_000), st.integers(-20, -1)), max_size=60))
def test_extents_and_gaps_tile_the_arena(steps: list[int]) -> None:
    """A positive step allocates so many bytes, a negative one frees some extent."""
    extents = ExtentAllocator(1 << 20)
    held: dict[int, int] = {}
    for step in steps:
        if step > 0:
            start = extents.allocate(step)
            if start is None:
                assert largest_gap(extents, held) < rounded(step)
            else:
                assert extents.size_of(start) == rounded(step)
                held[start] = step
        elif held:
            start = sorted(held)[step % len(held)]
            extents.free(start)
            del held[start]
        extents.check()
        assert extents.extents == len(held)


def test_a_freed_extent_is_an_exact_fit_for_the_next_of_its_size() -> None:
    extents = ExtentAllocator(10 * PAGE_BYTES * 10)
    starts = [extents.allocate(10 * PAGE_BYTES) for _ in range(10)]
    assert extents.allocate(1) is None
    assert starts[3] is not None
    extents.free(starts[3])
    assert extents.allocate(10 * PAGE_BYTES) == starts[3]


def test_the_lowest_of_equal_gaps_is_taken() -> None:
    extents = ExtentAllocator(100 * ALIGN_BYTES)
    starts = [extents.allocate(ALIGN_BYTES) for _ in range(100)]
    for at in (70, 10, 40):
        start = starts[at]
        assert start is not None
        extents.free(start)
    assert extents.allocate(1) == starts[10]


def test_rounding_wastes_less_than_an_eighth() -> None:
    for size in range(512, 300_000, 37):
        assert rounded(size) < size * 1.125
        assert rounded(size) % ALIGN_BYTES == 0
