"""Allowances in one process: the suite."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from pie.index.allowance import Allowances, MemoryAllowances
from pie.index.allowance_conformance import AllowanceConformance


class TestMemory(AllowanceConformance):
    @asynccontextmanager
    async def holders(self, count: int) -> AsyncIterator[Sequence[Allowances]]:
        first = MemoryAllowances("0")
        yield [first, *(first.beside(str(n)) for n in range(1, count))]
