"""What pages hold, and how long a run of them can be used, against a plain model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from pie.page.events import Part, PartMask, Tier, part_bit, part_tiers
from pie.page.layout import LayerSpec, PageLayout, StateSpec, usable_run, usable_segments

FULL = LayerSpec(Part.FULL, kv_heads=2, key_dim=8, value_dim=4)
WINDOW = LayerSpec(Part.WINDOW, kv_heads=2, key_dim=8, value_dim=8, window=5)
STATE = LayerSpec(Part.STATE, states=(StateSpec((3, 4), "float32"), StateSpec((5,), "bfloat16")))


def mask_of(*parts: Part, tier: Tier = Tier.HOST) -> PartMask:
    mask = 0
    for part in parts:
        mask |= part_bit(part, tier)
    return PartMask(mask)


part_sets = st.sets(st.sampled_from(Part))


def plain_usable_run(
    held: Sequence[set[Part]], parts: set[Part], window_tokens: int, page_tokens: int
) -> int:
    """The rule in words, tried for every length."""
    best = 0
    for n in range(1, len(held) + 1):
        first_in_window = max(0, n * page_tokens - window_tokens)
        good = all(Part.FULL in page for page in held[:n]) or Part.FULL not in parts
        if Part.WINDOW in parts:
            needed = {token // page_tokens for token in range(first_in_window, n * page_tokens)}
            good &= all(Part.WINDOW in held[page] for page in needed)
        if Part.STATE in parts:
            good &= Part.STATE in held[n - 1]
        if good:
            best = n
    return best


@given(
    st.lists(part_sets, max_size=12),
    part_sets.filter(bool),
    st.integers(1, 20),
    st.integers(1, 5),
    st.sampled_from(Tier),
)
def test_usable_run_is_the_longest_that_the_rule_allows(
    held: list[set[Part]], parts: set[Part], window_tokens: int, page_tokens: int, tier: Tier
) -> None:
    found = usable_run(
        [mask_of(*page, tier=tier) for page in held],
        parts=sorted(parts),
        window_tokens=window_tokens if Part.WINDOW in parts else 0,
        page_tokens=page_tokens,
    )
    assert found == plain_usable_run(held, parts, window_tokens, page_tokens)


@given(
    st.lists(st.tuples(part_sets, st.integers(1, 9)), max_size=8),
    part_sets.filter(bool),
    st.integers(1, 60),
    st.integers(1, 5),
)
def test_pages_that_are_alike_may_be_given_as_segments(
    held: list[tuple[set[Part], int]], parts: set[Part], window_tokens: int, page_tokens: int
) -> None:
    window_tokens = window_tokens if Part.WINDOW in parts else 0
    found = usable_segments(
        [(mask_of(*page), pages) for page, pages in held],
        parts=sorted(parts),
        window_tokens=window_tokens,
        page_tokens=page_tokens,
    )
    each = [page for page, pages in held for _ in range(pages)]
    assert found == plain_usable_run(each, parts, window_tokens, page_tokens)


def test_a_hole_in_full_ends_the_run() -> None:
    masks = [mask_of(Part.FULL), PartMask(0), mask_of(Part.FULL)]
    assert usable_run(masks, parts=[Part.FULL], window_tokens=0, page_tokens=16) == 1


def test_old_window_pages_may_be_missing() -> None:
    masks = [mask_of(Part.FULL), mask_of(Part.FULL, Part.WINDOW)]
    parts = [Part.FULL, Part.WINDOW]
    assert usable_run(masks, parts=parts, window_tokens=16, page_tokens=16) == 2
    assert usable_run(masks, parts=parts, window_tokens=17, page_tokens=16) == 0


def test_state_counts_at_the_end_only() -> None:
    masks = [mask_of(Part.STATE), PartMask(0), mask_of(Part.STATE), PartMask(0)]
    assert usable_run(masks, parts=[Part.STATE], window_tokens=0, page_tokens=16) == 3


def test_a_part_may_lie_in_several_tiers() -> None:
    mask = part_bit(Part.FULL, Tier.DEVICE) | part_bit(Part.FULL, Tier.POOL_RAM)
    assert part_tiers(PartMask(mask), Part.FULL) == 1 << Tier.DEVICE | 1 << Tier.POOL_RAM
    assert part_tiers(PartMask(mask), Part.WINDOW) == 0


def test_every_part_and_tier_has_a_bit_of_its_own() -> None:
    bits = [part_bit(part, tier) for part in Part for tier in Tier]
    assert len(set(bits)) == len(bits)
    assert all(bit.bit_count() == 1 for bit in bits)


def test_sizes_are_those_of_the_layers() -> None:
    layout = PageLayout((FULL, WINDOW, FULL, STATE), page_tokens=16, dtype="bfloat16")
    assert layout.parts == (Part.FULL, Part.WINDOW, Part.STATE)
    assert layout.part_bytes(Part.FULL) == 2 * 2 * (8 + 4) * 16 * 2
    assert layout.part_bytes(Part.WINDOW) == 2 * (8 + 8) * 16 * 2
    assert layout.part_bytes(Part.STATE) == layout.state_bytes == 3 * 4 * 4 + 5 * 2
    assert layout.attention_parts == (Part.FULL, Part.WINDOW)
    assert layout.page_bytes == layout.part_bytes(Part.FULL) + layout.part_bytes(Part.WINDOW)
    assert layout.window_tokens == 5


@pytest.mark.parametrize(
    "change",
    [
        {"part": Part.WINDOW},
        {"kv_heads": 1},
        {"key_dim": 4},
        {"value_dim": 8},
        {"window": 9},
        {"states": (StateSpec((2,), "float32"),)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_layout_id_changes_with_every_field_of_a_layer(change: dict[str, object]) -> None:
    other = replace(FULL, **change)  # type: ignore[arg-type]
    one = PageLayout((FULL, FULL), 16, "float32")
    assert one.layout_id != PageLayout((FULL, other), 16, "float32").layout_id


def test_layout_id_names_order_and_number_of_layers() -> None:
    def layout_id(*layers: LayerSpec) -> str:
        return PageLayout(layers, 16, "float32").layout_id

    ids = [layout_id(FULL, STATE), layout_id(STATE, FULL), layout_id(FULL), layout_id(FULL, FULL)]
    assert len(set(ids)) == 4


def test_layout_id_keeps_states_apart() -> None:
    def layout_id(*shapes: tuple[int, ...], dtype: str = "float32") -> str:
        states = tuple(StateSpec(shape, dtype) for shape in shapes)
        return PageLayout((LayerSpec(Part.STATE, states=states),), 16, "float32").layout_id

    ids = {layout_id((1, 2)), layout_id((1,), (2,)), layout_id((12,)), layout_id()}
    ids.add(layout_id((12,), dtype="bfloat16"))
    assert len(ids) == 5


def test_layout_ids_of_attention_layers_stay_as_they_were() -> None:
    """Pages on disk go by them."""
    layout = PageLayout((FULL, WINDOW), 16, "bfloat16")
    assert layout.layout_id == "5af4b6430d63be136bbfce460471912f"
