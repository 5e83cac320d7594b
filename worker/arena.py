"""The device's KV memory.

Covers the physical pages of one model on one device: the tensors that layers write and read, and
the bytes of a page's part for stores and loads. Does not cover who holds which page
(`pie.worker.page_table`) or what goes into a file around a payload (`pie.page.format`).

A payload's order is fixed by the layout, whatever the arena's own arrangement: the layers of the
part in order, each its keys `[page_tokens, kv_heads, key_dim]` and then its values
`[page_tokens, kv_heads, value_dim]`, little-endian.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from pie.page.events import Part
from pie.page.layout import LayerSpec, PageLayout
from pie.worker.cuda_copies import CudaCopies
from pie.worker.errors import NotEnoughMemory, UnsupportedModel

TORCH_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class _Slab:
    """Consecutive tensors of a part that have one shape, in one piece of memory."""

    memory: torch.Tensor
    """`[tensors, pages, elements of one page]`"""
    raw: NDArray[np.uint8] | None
    """The same memory as bytes, on the CPU."""
    offset: int
    """Where its bytes begin in a payload."""
    bytes: int
    """Its share of a payload."""


class Arena:
    """Physical pages of every layer of a model, all of them allocated at once.

    `export` and `load` are safe from any thread while other pages are written; who calls them holds
    a pin on the page. They copy with one thread, so that they leave the engine's cores alone.
    """

    def __init__(
        self, layout: PageLayout, num_pages: int, device: torch.device | str = "cpu"
    ) -> None:
        """Allocate `num_pages` pages, all zeros; the memory is taken as pages are first written.

        Raises:
            UnsupportedModel: The layout has recurrent states.
            NotEnoughMemory: Not even one page.
        """
        if num_pages < 1:
            raise NotEnoughMemory(
                f"one page of this model takes {layout.page_bytes} bytes, more than the budget: "
                "raise [model] device_kv_budget or lower page_tokens"
            )
        if Part.STATE in layout.parts:
            raise UnsupportedModel("this arena holds no recurrent states")
        assert sys.byteorder == "little", "payloads are little-endian"
        self.layout = layout
        self.num_pages = num_pages
        self.device = torch.device(device)
        self.dtype = TORCH_DTYPES[layout.dtype]
        self._cuda = CudaCopies(self.device) if self.device.type == "cuda" else None
        self.keys: list[torch.Tensor] = []
        """For each layer, `[num_pages, page_tokens, kv_heads, key_dim]`."""
        self.values: list[torch.Tensor] = []
        """For each layer, `[num_pages, page_tokens, kv_heads, value_dim]`."""
        tensors: dict[int, torch.Tensor] = {}
        self._slabs: dict[Part, list[_Slab]] = {}
        for part in layout.parts:
            self._slabs[part] = list(self._allocate(part, tensors))
        for index in range(len(layout.layers)):
            self.keys.append(tensors[2 * index])
            self.values.append(tensors[2 * index + 1])

    @classmethod
    def from_budget(
        cls, layout: PageLayout, budget_bytes: int, device: torch.device | str = "cpu"
    ) -> Arena:
        """Allocate as many pages as fit into `budget_bytes`."""
        return cls(layout, budget_bytes // layout.page_bytes, device)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, all parts."""
        return self.layout.page_bytes

    @property
    def bytes(self) -> int:
        """Bytes of all pages."""
        return self.num_pages * self.page_bytes

    def export(self, page_id: int, part: Part) -> memoryview:
        """Return a copy of a page's part, `layout.part_bytes(part)` bytes in payload order."""
        out = np.empty(self.layout.part_bytes(part), np.uint8)
        for slab in self._slabs[part]:
            target = out[slab.offset : slab.offset + slab.bytes]
            if self._cuda is not None:
                self._cuda.to_host(slab.memory[:, page_id], target)
                continue
            if slab.raw is not None:
                source = slab.raw[:, page_id]
            else:
                source = slab.memory[:, page_id].contiguous().cpu().view(torch.uint8).numpy()
            np.copyto(target.reshape(source.shape), source)
        return out.data

    def load(self, page_id: int, part: Part, payload: Buffer) -> None:
        """Write what `export` returned, here or elsewhere, into a page.

        Raises:
            ValueError: The payload has another size than the layout says.
        """
        data = np.frombuffer(payload, np.uint8)
        if data.size != self.layout.part_bytes(part):
            raise ValueError(
                f"a {part.name.lower()} payload has {self.layout.part_bytes(part)} bytes, "
                f"this one {data.size}"
            )
        for slab in self._slabs[part]:
            source = data[slab.offset : slab.offset + slab.bytes]
            if self._cuda is not None:
                self._cuda.to_device(source, slab.memory[:, page_id])
            elif slab.raw is not None:
                target = slab.raw[:, page_id]
                np.copyto(target, source.reshape(target.shape))
            else:
                target_memory = slab.memory[:, page_id]
                host = torch.from_numpy(source.copy()).view(self.dtype)
                target_memory.copy_(host.view(target_memory.shape))

    def copy(self, source_id: int, target_id: int) -> None:
        """Copy a whole page onto another, for copy on write."""
        for slabs in self._slabs.values():
            for slab in slabs:
                slab.memory[:, target_id].copy_(slab.memory[:, source_id])

    def _allocate(self, part: Part, tensors: dict[int, torch.Tensor]) -> Iterator[_Slab]:
        """Allocate a part; put the tensor of layer `i`'s keys at `2i`, of its values at `2i + 1`."""
        rows = _shapes(self.layout, part)
        offset = 0
        while rows:
            shape = rows[0][1]
            run = 0
            while run < len(rows) and rows[run][1] == shape:
                run += 1
            elements = self.layout.page_tokens * shape[0] * shape[1]
            memory = torch.zeros(
                (run, self.num_pages, elements), dtype=self.dtype, device=self.device
            )
            for i, (number, _) in enumerate(rows[:run]):
                tensors[number] = memory[i].view(self.num_pages, self.layout.page_tokens, *shape)
            raw = memory.view(torch.uint8).numpy() if self.device.type == "cpu" else None
            size = run * elements * memory.element_size()
            yield _Slab(memory, raw, offset, size)
            offset += size
            rows = rows[run:]


def _shapes(layout: PageLayout, part: Part) -> list[tuple[int, tuple[int, int]]]:
    """Return number and `(heads, dim)` of each tensor of a part, in payload order."""
    found: list[tuple[int, tuple[int, int]]] = []
    for index, spec in enumerate(layout.layers):
        if spec.part is part:
            found += [(2 * index, _key_shape(spec)), (2 * index + 1, _value_shape(spec))]
    return found


def _key_shape(spec: LayerSpec) -> tuple[int, int]:
    return spec.kv_heads, spec.key_dim


def _value_shape(spec: LayerSpec) -> tuple[int, int]:
    return spec.kv_heads, spec.value_dim
