"""Mooncake Store's side of the pool's contest: `store MASTER`, or `client MASTER`.

The store keeps the memory and the client has none, so that every put and get crosses the network. Runs in
Mooncake's own environment, so it imports numpy and the standard library alone.
"""

from __future__ import annotations

import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

import numpy as np

_MIB = 1 << 20
_ROUNDS = 5
_BYTES = 64 * _MIB


class _Store(Protocol):
    """What is used of Mooncake's."""

    def register_buffer(self, address: int, size: int) -> int: ...
    def unregister_buffer(self, address: int) -> int: ...
    def batch_put_from(self, keys: list[str], at: list[int], sizes: list[int]) -> list[int]: ...
    def batch_get_into(self, keys: list[str], at: list[int], sizes: list[int]) -> list[int]: ...


def main() -> int:
    mode, master = sys.argv[1:]
    # It is in an environment of its own, where no type checker looks.
    store = importlib.import_module("mooncake.store").MooncakeDistributedStore()
    segment = 1 << 30 if mode == "store" else 0
    said = store.setup("127.0.0.1", "P2PHANDSHAKE", segment, 128 * _MIB, "tcp", "", master)
    if said:
        print(f"Mooncake said {said}", file=sys.stderr)
        return 1
    if mode == "store":
        print("ready", flush=True)
        sys.stdin.read()
    else:
        print(json.dumps({f"{mib}mib": _measure(store, mib * _MIB) for mib in (1, 4)}), flush=True)
    store.close()
    return 0


def _measure(store: _Store, size: int) -> Mapping[str, float]:
    """Return GB/s of puts and gets out of and into one registered arena."""
    count = _BYTES // size
    arena = np.random.default_rng(1).integers(0, 255, _BYTES, dtype=np.uint8)
    address = arena.ctypes.data
    store.register_buffer(address, arena.nbytes)
    at = [address + i * size for i in range(count)]
    puts: list[float] = []
    gets: list[float] = []
    for number in range(_ROUNDS + 1):
        keys = [f"{size}-{number}-{i}" for i in range(count)]
        puts.append(_gb_s(partial(store.batch_put_from, keys, at, [size] * count)))
        gets.append(_gb_s(partial(store.batch_get_into, keys, at, [size] * count)))
    store.unregister_buffer(address)
    return {
        "put_gb_s": round(statistics.median(puts[1:]), 3),
        "get_gb_s": round(statistics.median(gets[1:]), 3),
    }


def _gb_s(do: Callable[[], list[int]]) -> float:
    began = time.perf_counter()
    said = do()
    seconds = time.perf_counter() - began
    assert all(one >= 0 for one in said), said
    return _BYTES / seconds / 1e9


if __name__ == "__main__":
    sys.exit(main())
