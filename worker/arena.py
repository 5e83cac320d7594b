"""The device's memory of pages and recurrent states.

Covers the physical pages and the state slots of one model on one device: the tensors that layers
write and read, and the bytes of a page's part for stores and loads. Does not cover who holds which
page or slot (`pie.worker.page_table`, `pie.worker.state_table`), how a budget is split between the
two (`pie.worker.budget`) or what goes into a file around a payload (`pie.page.format`).

A payload's order is fixed by the layout, whatever the arena's own arrangement: the layers of the
part in order, each its keys `[page_tokens, kv_heads, key_dim]` and then its values
`[page_tokens, kv_heads, value_dim]`, or its recurrent states one after the other, little-endian.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from pie.page.events import Part
from pie.page.layout import LayerSpec, PageLayout
from pie.worker.cuda_copies import CudaCopies
from pie.worker.errors import NotEnoughMemory
from pie.worker.huge_pages import HugePages

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
    """`[tensors, pages or slots, elements of one]`"""
    raw: NDArray[np.uint8] | None
    """The same memory as bytes, on the CPU."""
    offset: int
    """Where its bytes begin in a payload."""
    bytes: int
    """Its share of a payload."""


LEAST_STATE_SLOTS = 2
"""One that a sequence goes on from, and one that it writes."""


class Arena:
    """Physical pages and state slots of every layer of a model, all of them allocated at once.

    `export` and `load` are safe from any thread while other pages are written; who calls them holds
    a pin on the page. They copy with one thread, so that they leave the engine's cores alone.
    """

    def __init__(
        self,
        layout: PageLayout,
        num_pages: int,
        device: torch.device | str = "cpu",
        *,
        state_slots: int = 0,
    ) -> None:
        """Allocate pages and state slots, all zeros.

        The memory is taken as they are first written, on a CPU 2 MiB of each layer at a time.

        Raises:
            NotEnoughMemory: Not even one page, or too few state slots for one sequence.
        """
        if num_pages < 1 and layout.attention_parts:
            raise NotEnoughMemory(
                f"one page of this model takes {layout.page_bytes} bytes, more than the budget: "
                "raise [model] device_kv_budget, or lower page_tokens or, in a recurrent model, "
                "state_share"
            )
        if state_slots < LEAST_STATE_SLOTS and layout.state_bytes:
            raise NotEnoughMemory(
                f"one sequence of this model needs room for {LEAST_STATE_SLOTS} recurrent states "
                f"of {layout.state_bytes} bytes, more than its share of the budget: raise [model] "
                "device_kv_budget or state_share"
            )
        assert sys.byteorder == "little", "payloads are little-endian"
        self.layout = layout
        self.num_pages = num_pages
        self.state_slots = state_slots
        self.device = torch.device(device)
        self.dtype = TORCH_DTYPES[layout.dtype]
        self._cuda = CudaCopies(self.device) if self.device.type == "cuda" else None
        attention = [spec for spec in layout.layers if spec.part is not Part.STATE]
        tensors: dict[int, torch.Tensor] = {}
        self._slabs: dict[Part, list[_Slab]] = {}
        for part in layout.attention_parts:
            self._slabs[part] = list(self._allocate(_shapes(attention, part), tensors))
        self.keys: list[torch.Tensor] = [tensors[2 * i] for i in range(len(attention))]
        """For each layer with attention, `[num_pages, page_tokens, kv_heads, key_dim]`."""
        self.values: list[torch.Tensor] = [tensors[2 * i + 1] for i in range(len(attention))]
        """For each layer with attention, `[num_pages, page_tokens, kv_heads, value_dim]`."""
        self.states: list[torch.Tensor] = []
        """For each recurrent state in the layout's order, `[state_slots, *shape]`."""
        if layout.state_bytes:
            self._slabs[Part.STATE] = list(self._allocate_states())

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, its attention parts."""
        return self.layout.page_bytes

    @property
    def bytes(self) -> int:
        """Bytes of all pages and state slots."""
        return self.num_pages * self.page_bytes + self.state_slots * self.layout.state_bytes

    def export(self, page_id: int, part: Part) -> memoryview:
        """Return a copy of a page's part, `layout.part_bytes(part)` bytes in payload order.

        For `Part.STATE`, `page_id` is a state slot.
        """
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
        """Write what `export` returned, here or elsewhere, into a page or, for states, a slot.

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
                host = torch.from_numpy(source.copy()).view(target_memory.dtype)
                target_memory.copy_(host.view(target_memory.shape))

    def copy(self, source_id: int, target_id: int) -> None:
        """Copy a whole page onto another, for copy on write."""
        for part in self.layout.attention_parts:
            self._copy(part, source_id, target_id)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy token slots (`page × page_tokens + offset`) onto others, none of which is a source."""
        source = torch.tensor(sources, device=self.device)
        target = torch.tensor(targets, device=self.device)
        for tensor in (*self.keys, *self.values):
            flat = tensor.flatten(0, 1)
            flat.index_copy_(0, target, flat[source])
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def copy_state(self, source_slot: int, target_slot: int) -> None:
        """Copy the states in a slot onto another, for a sequence that forks."""
        if self.layout.state_bytes:
            self._copy(Part.STATE, source_slot, target_slot)

    def _copy(self, part: Part, source: int, target: int) -> None:
        for slab in self._slabs[part]:
            slab.memory[:, target].copy_(slab.memory[:, source])
        if self.device.type == "cuda":
            # Stores and loads have streams of their own, and may come to either page next.
            torch.cuda.current_stream(self.device).synchronize()

    def _allocate(
        self, rows: Sequence[tuple[int, tuple[int, int]]], tensors: dict[int, torch.Tensor]
    ) -> Iterator[_Slab]:
        """Allocate a part's tensors, given as `_shapes` does, and enter them by number."""
        offset = 0
        while rows:
            shape = rows[0][1]
            run = 0
            while run < len(rows) and rows[run][1] == shape:
                run += 1
            elements = self.layout.page_tokens * shape[0] * shape[1]
            slab = self._slab(run, self.num_pages, elements, self.dtype, offset)
            for i, (number, _) in enumerate(rows[:run]):
                tensors[number] = slab.memory[i].view(
                    self.num_pages, self.layout.page_tokens, *shape
                )
            yield slab
            offset += slab.bytes
            rows = rows[run:]

    def _allocate_states(self) -> Iterator[_Slab]:
        offset = 0
        for state in (state for spec in self.layout.layers for state in spec.states):
            dtype = TORCH_DTYPES[state.dtype]
            slab = self._slab(1, self.state_slots, math.prod(state.shape), dtype, offset)
            self.states.append(slab.memory[0].view(self.state_slots, *state.shape))
            yield slab
            offset += slab.bytes

    def _slab(
        self, tensors: int, count: int, elements: int, dtype: torch.dtype, offset: int
    ) -> _Slab:
        shape = (tensors, count, elements)
        if self.device.type == "cpu":
            memory = HugePages().zeros(shape, dtype)
            raw = memory.view(torch.uint8).numpy()
        else:
            memory, raw = torch.zeros(shape, dtype=dtype, device=self.device), None
        return _Slab(memory, raw, offset, tensors * elements * memory.element_size())


def _shapes(attention: Sequence[LayerSpec], part: Part) -> list[tuple[int, tuple[int, int]]]:
    """Return number and `(heads, dim)` of each tensor of a part, in payload order.

    The keys of the `i`-th layer with attention have number `2i`, its values `2i + 1`.
    """
    found: list[tuple[int, tuple[int, int]]] = []
    for index, spec in enumerate(attention):
        if spec.part is part:
            found += [
                (2 * index, (spec.kv_heads, spec.key_dim)),
                (2 * index + 1, (spec.kv_heads, spec.value_dim)),
            ]
    return found
