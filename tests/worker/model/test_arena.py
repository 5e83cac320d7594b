"""A page's bytes leave one arena and enter another, in one fixed order."""

from __future__ import annotations

import threading

import pytest
import torch

from pie.page.events import Part
from pie.page.layout import LayerSpec, PageLayout
from pie.worker.arena import Arena
from pie.worker.errors import NotEnoughMemory, UnsupportedModel

PAGE_TOKENS = 4


def layout(*layers: LayerSpec, dtype: str = "float32") -> PageLayout:
    return PageLayout(layers=layers, page_tokens=PAGE_TOKENS, dtype=dtype)


FULL = LayerSpec(Part.FULL, kv_heads=2, key_dim=8, value_dim=8)
WIDE = LayerSpec(Part.FULL, kv_heads=1, key_dim=8, value_dim=4)
WINDOW = LayerSpec(Part.WINDOW, kv_heads=2, key_dim=8, value_dim=8, window=6)

LAYOUTS = {
    "uniform": layout(FULL, FULL, FULL),
    "mixed": layout(WINDOW, FULL, WINDOW, WIDE, FULL),
    "half": layout(FULL, WINDOW, dtype="bfloat16"),
}


@pytest.fixture(params=list(LAYOUTS.values()), ids=list(LAYOUTS))
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


def test_a_budget_is_never_exceeded() -> None:
    made = LAYOUTS["mixed"]
    arena = Arena.from_budget(made, 10 * made.page_bytes + made.page_bytes - 1)
    held = sum(t.untyped_storage().nbytes() for t in {id(t): t for t in _storages(arena)}.values())
    assert arena.num_pages == 10
    assert held == arena.bytes <= 11 * made.page_bytes - 1


def _storages(arena: Arena) -> list[torch.Tensor]:
    seen: dict[int, torch.Tensor] = {}
    for tensor in (*arena.keys, *arena.values):
        seen.setdefault(tensor.untyped_storage().data_ptr(), tensor)
    return list(seen.values())


def test_a_budget_of_less_than_a_page_is_one_clear_sentence() -> None:
    with pytest.raises(NotEnoughMemory, match="device_kv_budget"):
        Arena.from_budget(LAYOUTS["uniform"], 100)


def test_recurrent_states_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="recurrent"):
        Arena(layout(FULL, LayerSpec(Part.STATE, states=((4, 4),))), 2)


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
