"""Which policies are in force at one place, and which were before any was applied.

Covers reading a version that was applied. Does not cover where versions come from
(`pie.index.policy_follower`) or what changes with them (`pie.worker`, `pie.pool`, `pie.router`).
"""

from __future__ import annotations

import asyncio

from pie.policies.errors import PolicyFileError, PolicyLateError
from pie.policies.loader import load_policies
from pie.policies.policy_set import PolicySet


class PolicyVersions:
    """The policies of one place.

    Args:
        own: What its configuration names; in force until a version is applied.
    """

    def __init__(self, own: PolicySet) -> None:
        self.own = own
        self.current = own

    def read(self, number: int, text: str | None) -> PolicySet:
        """Return the policies of a version; None as its text is what the configuration names.

        Users' modules are looked for beside the file of the configuration.

        Raises:
            PolicyFileError: It is not acceptable here, such as where a module is missing.
        """
        if text is None:
            return self.own
        return load_policies(text, name=f"version {number}", folder=self.own.folder)

    async def look_at(self, number: int, text: str | None) -> PolicySet | str:
        """Return what `read` returns, read on a thread, or why it is not acceptable here.

        Raises:
            PolicyLateError: It may be at another try.
        """
        try:
            return await asyncio.to_thread(self.read, number, text)
        except PolicyLateError:
            raise
        except PolicyFileError as error:
            return str(error)
