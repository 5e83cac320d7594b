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
    """Programs by id. Where there are too many, the tenant whose take most gives the one that it used last ago.

    So a tenant that installs without end pushes out its own, and never those of one that has less than it.

    Args:
        budget_bytes: Most bytes of all texts.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._programs: dict[str, OrderedDict[str, StoredProgram]] = {}
        """Of each tenant, the latest used last."""
        self._used_bytes: dict[str, int] = {}
        """By tenant."""
        self._uses: OrderedDict[str, str] = OrderedDict()
        """Whose each program is, the latest used last."""

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
        program = StoredProgram(named, name, source, now_s, tenant)
        self._make_room(len(source), tenant)
        self._programs.setdefault(tenant, OrderedDict())[named] = program
        self._used_bytes[tenant] = self._used_bytes.get(tenant, 0) + len(source)
        self._uses[named] = tenant
        return program

    def get(self, named: str, tenant: str = "") -> StoredProgram | None:
        """Return a tenant's program, which counts as using it; None where it has none of that name."""
        programs = self._programs.get(tenant)
        if programs is None or named not in programs:
            return None
        programs.move_to_end(named)
        self._uses.move_to_end(named)
        return programs[named]

    def remove(self, named: str, tenant: str = "") -> bool:
        """Forget a tenant's program; return whether there was one."""
        programs = self._programs.get(tenant)
        if programs is None or named not in programs:
            return False
        self._used_bytes[tenant] -= len(programs.pop(named).source)
        del self._uses[named]
        if not programs:
            del self._programs[tenant], self._used_bytes[tenant]
        return True

    def of(self, tenant: str = "") -> list[StoredProgram]:
        """List a tenant's programs, the latest used last."""
        return list(self._programs.get(tenant, {}).values())

    def _make_room(self, size: int, tenant: str) -> None:
        """Forget programs until another one of `tenant` has room."""
        used = self._used_bytes
        while sum(used.values()) + size > self._budget_bytes:
            takes = {one: taken + size * (one == tenant) for one, taken in used.items()}
            most = [one for one, taken in takes.items() if taken == max(takes.values())]
            if tenant in most:
                # Of those that take as much, the one that wants more.
                most = [tenant]
            oldest = next(named for named, owner in self._uses.items() if owner in most)
            self.remove(oldest, self._uses[oldest])
