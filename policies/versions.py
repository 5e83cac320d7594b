"""Which policies are in force at one place, and which were before any was applied.

Covers reading a version that was applied. Does not cover where versions come from
(`pie.index.policy_follower`) or what changes with them (`pie.worker`, `pie.pool`, `pie.router`).
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from pie.policies.errors import PolicyFileError, PolicyLateError
from pie.policies.loader import load_policies, read_policy_file
from pie.policies.policy_set import PolicySet


def differs(number: int, text: str | None, said: str | None, file: str) -> str:
    """Return that a version is in force that says something else than the configuration's file; empty where it does not.

    Args:
        number: The version; 0 where none was applied.
        text: What it says; None where that is what the configuration names.
        said: What the file says; None where there is none, or it cannot be read.
        file: What it is called.
    """
    if not number or text is None or said is None or text == said:
        return ""
    return (
        f"version {number} is in force; {Path(file).name} differs from it "
        f"(`pie policy apply {file}` or `pie policy rollback 0`)"
    )


class PolicyVersions:
    """The policies of one place.

    Args:
        own: What its configuration names; in force until a version is applied.
    """

    def __init__(self, own: PolicySet) -> None:
        self.own = own
        self.current = own

    async def file_differs(self, number: int, text: str | None) -> str:
        """Return that a version says something else than the configuration's file does by now; empty where not."""
        if not number or text is None or not self.own.file:
            return ""
        said = await asyncio.to_thread(_read_now, self.own.file)
        return differs(number, text, said, self.own.file)

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


def _read_now(file: str) -> str | None:
    """Return what a file says; None where it cannot be read."""
    try:
        content = read_policy_file(Path(file)).text
        return None if content is None else content.decode("utf-8-sig")
    except (PolicyFileError, UnicodeDecodeError):
        return None
