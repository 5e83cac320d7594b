"""Programs that clients have installed, named by what they are. Pure.

Covers keeping them in memory within a cap. Does not cover running them (`pie.router.program_runs`). A router
that is started again knows none: clients install anew what it does not know, under the same name.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import msgspec
from blake3 import blake3

_PURPOSE = b"pie/inferlet"
_ID_BYTES = 16


@dataclass(frozen=True, slots=True)
class StoredProgram:
    """A program's text."""

    id: str
    name: str
    source: bytes
    """UTF-8."""
    created_s: int
    tenant: str = ""
    """Whose it is; nobody else sees it."""


def program_id(name: str, source: bytes, tenant: str) -> str:
    """Return the name of a program: a hash of whose it is, what it is called, and its text."""
    fields = msgspec.msgpack.encode((tenant, name, source))
    return blake3(_PURPOSE + fields).hexdigest(_ID_BYTES)


class ProgramStore:
    """Programs by id; those that were not used for the longest go first.

    Args:
        budget_bytes: Most bytes of all texts.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._used_bytes = 0
        self._programs: OrderedDict[str, StoredProgram] = OrderedDict()

    def install(
        self, name: str, source: bytes, now_s: int, tenant: str = ""
    ) -> StoredProgram | None:
        """Keep a program; None where it is larger than all that may be kept."""
        if len(source) > self._budget_bytes:
            return None
        named = program_id(name, source, tenant)
        known = self.get(named, tenant)
        if known is not None:
            return known
        program = self._programs[named] = StoredProgram(named, name, source, now_s, tenant)
        self._used_bytes += len(source)
        while self._used_bytes > self._budget_bytes:
            _, oldest = self._programs.popitem(last=False)
            self._used_bytes -= len(oldest.source)
        return program

    def get(self, named: str, tenant: str = "") -> StoredProgram | None:
        """Return a tenant's program, which counts as using it; None where it has none of that name."""
        program = self._programs.get(named)
        if program is None or program.tenant != tenant:
            return None
        self._programs.move_to_end(named)
        return program

    def remove(self, named: str, tenant: str = "") -> bool:
        """Forget a tenant's program; return whether there was one."""
        program = self.get(named, tenant)
        if program is None:
            return False
        del self._programs[named]
        self._used_bytes -= len(program.source)
        return True

    def of(self, tenant: str = "") -> list[StoredProgram]:
        """List a tenant's programs, the latest used last."""
        return [program for program in self._programs.values() if program.tenant == tenant]
