"""A page's bytes leave one arena and enter another, in one fixed order."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, strategies as st

from pie.page.events import Part
from pie.page.layout import LayerSpec, PageLayout, StateSpec
from pie.worker.arena import Arena
from pie.worker.budget import split_budget
from pie.worker.errors import NotEnoughMemory

PAGE_TOKENS = 4


def layout(*layers: LayerSpec, dtype: str = "float32") -> PageLayout:
    return PageLayout(layers=layers, page_tokens=PAGE_TOKENS, dtype=dtype)


FULL = LayerSpec(Part.FULL, kv_heads=2, key_dim=8, value_dim=8)
WIDE = LayerSpec(Part.FULL, kv_heads=1, key_dim=8, value_dim=4)
WINDOW = LayerSpec(Part.WINDOW, kv_heads=2, key_dim=8, value_dim=8, window=6)
STATE = LayerSpec(
    Part.STATE, states=(StateSpec((6, 4), "bfloat16"), StateSpec((3, 4, 5), "float32"))
)

LAYOUTS = {
    "uniform": layout(FULL, FULL, FULL),
    "mixed": layout(WINDOW, FULL, WINDOW, WIDE, FULL),
    "half": layout(FULL, WINDOW, dtype="bfloat16"),
    "hybrid": layout(STATE, FULL, STATE, dtype="bfloat16"),
    "recurrent": layout(STATE, STATE),
}
PAGED = {name: one for name, one in LAYOUTS.items() if not one.state_bytes}


@pytest.fixture(params=list(PAGED.values()), ids=list(PAGED))
def filled(request: pytest.FixtureRequest) -> Arena:
    arena = Arena(request.param, 5)
    for tensors in (arena.keys, arena.values):
        for tensor in tensors:
            tensor.copy_(torch.randn(tensor.shape))
    return arena


def test_a_payload_is_each_layers_keys_and_then_its_values(filled: Arena) -> None:
    for part in filled.layout.parts:
        expected = b""
        for spec, keys, values in zip(
            filled.layout.layers, filled.keys, filled.values, strict=True
        ):
            if spec.part is part:
                for tensor in (keys[3], values[3]):
                    assert tensor.shape[:2] == (PAGE_TOKENS, spec.kv_heads)
                    expected += tensor.contiguous().view(torch.uint8).numpy().tobytes()
        payload = filled.export(3, part)
        assert bytes(payload) == expected
        assert len(payload) == filled.layout.part_bytes(part)


def test_a_page_goes_from_one_arena_to_another(filled: Arena) -> None:
    other = Arena(filled.layout, 3)
    for part in filled.layout.parts:
        other.load(1, part, filled.export(4, part))
    for mine, theirs in ((filled.keys, other.keys), (filled.values, other.values)):
        for a, b in zip(mine, theirs, strict=True):
            assert torch.equal(a[4], b[1])
            assert not b[0].any()
            assert not b[2].any()


def test_an_export_is_a_copy(filled: Arena) -> None:
    payload = filled.export(2, Part.FULL)
    before = bytes(payload)
    for tensor in filled.keys:
        tensor[2].zero_()
    assert bytes(payload) == before


def test_a_copied_page_has_all_parts(filled: Arena) -> None:
    filled.copy(1, 2)
    for tensors in (filled.keys, filled.values):
        for tensor in tensors:
            assert torch.equal(tensor[1], tensor[2])


@pytest.mark.parametrize("change", [-1, 1])
def test_a_payload_of_another_size_is_refused(filled: Arena, change: int) -> None:
    payload = bytes(filled.export(0, Part.FULL))
    wrong = payload[:change] if change < 0 else payload + b"x"
    with pytest.raises(ValueError, match="has"):
        filled.load(0, Part.FULL, wrong)


@pytest.mark.parametrize("name", list(LAYOUTS))
@given(budget=st.integers(20_000, 200_000), share=st.floats(0.1, 0.9), running=st.integers(1, 20))
def test_a_budget_is_never_exceeded(name: str, budget: int, share: float, running: int) -> None:
    made = LAYOUTS[name]
    shares = split_budget(made, budget, state_share=share, max_running=running)
    arena = Arena(made, shares.pages, state_slots=shares.state_slots)
    held = sum(tensor.untyped_storage().nbytes() for tensor in _storages(arena))
    assert held == arena.bytes <= budget
    if not made.state_bytes or not made.attention_parts:
        assert budget - arena.bytes < made.page_bytes + made.state_bytes


def test_states_take_their_share_and_no_more_than_is_of_use() -> None:
    made, running = LAYOUTS["hybrid"], 4
    page, state = made.page_bytes, made.state_bytes
    many = split_budget(made, 100 * (page + state), state_share=0.1, max_running=running)
    assert many.state_slots == 10 * (page + state) // state
    few = split_budget(made, 100 * (page + state), state_share=0.99, max_running=running)
    assert few.state_slots <= few.pages + 2 * running
    assert few.state_slots * state < 0.9 * 100 * (page + state)


def _storages(arena: Arena) -> list[torch.Tensor]:
    seen: dict[int, torch.Tensor] = {}
    for tensor in (*arena.keys, *arena.values, *arena.states):
        seen.setdefault(tensor.untyped_storage().data_ptr(), tensor)
    return list(seen.values())


def test_a_budget_of_less_than_a_page_is_one_clear_sentence() -> None:
    with pytest.raises(NotEnoughMemory, match="device_kv_budget"):
        Arena(LAYOUTS["uniform"], 0)


def test_a_budget_of_less_than_two_states_is_one_clear_sentence() -> None:
    for name, pages in (("recurrent", 0), ("hybrid", 4)):
        with pytest.raises(NotEnoughMemory, match=r"2 recurrent states of .* device_kv_budget"):
            Arena(LAYOUTS[name], pages, state_slots=1)


def test_a_states_payload_is_the_states_in_order() -> None:
    arena = _with_states("hybrid")
    expected = b"".join(
        state[2].contiguous().view(torch.uint8).numpy().tobytes() for state in arena.states
    )
    payload = bytes(arena.export(2, Part.STATE))
    assert payload == expected
    assert len(payload) == arena.layout.state_bytes


@pytest.mark.parametrize("name", ["hybrid", "recurrent"])
def test_states_go_from_one_arena_to_another(name: str) -> None:
    arena, other = _with_states(name), _with_states(name)
    other.load(0, Part.STATE, arena.export(3, Part.STATE))
    for mine, theirs in zip(arena.states, other.states, strict=True):
        assert torch.equal(mine[3], theirs[0])
        assert not torch.equal(mine[1], theirs[1])


def test_states_of_another_size_are_refused() -> None:
    arena = _with_states("hybrid")
    with pytest.raises(ValueError, match="state payload has"):
        arena.load(0, Part.STATE, bytes(arena.export(0, Part.STATE))[:-1])


def test_a_copied_state_leaves_pages_and_other_slots_alone() -> None:
    arena = _with_states("hybrid")
    before = [tensor.clone() for tensor in (*arena.keys, *arena.states)]
    arena.copy_state(1, 3)
    for tensor, old in zip(arena.keys, before, strict=False):
        assert torch.equal(tensor, old)
    for state, old in zip(arena.states, before[len(arena.keys) :], strict=True):
        assert torch.equal(state[3], old[1])
        assert torch.equal(state[:3], old[:3])


def _with_states(name: str) -> Arena:
    layout = LAYOUTS[name]
    arena = Arena(layout, 2 if layout.attention_parts else 0, state_slots=4)
    for state in arena.states:
        state.copy_(torch.randn(state.shape))
    return arena


def test_pages_are_exported_while_others_are_written() -> None:
    made = layout(FULL, FULL)
    arena = Arena(made, 40)
    for tensor in (*arena.keys, *arena.values):
        for page in range(40):
            tensor[page] = page
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            for page in range(1, 40, 2):
                for tensor in (*arena.keys, *arena.values):
                    tensor[page] += 1

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(20):
            for page in range(0, 40, 2):
                held = torch.frombuffer(
                    bytearray(arena.export(page, Part.FULL)), dtype=torch.float32
                )
                assert bool((held == page).all())
                arena.load(page, Part.FULL, arena.export(page, Part.FULL))
    finally:
        stop.set()
        writer.join(10)
