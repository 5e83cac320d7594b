"""The shapes of `/admin/policies`: versions of the policies, and which place runs which.

Does not cover what a policy file may say (`pie.policies.loader`).
"""

from __future__ import annotations

import msgspec


class ApplyBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A policy file to put in force everywhere."""

    text: str | None
    """Its content; None lets every place go back to what its configuration names."""
    note: str = ""
    """Where it comes from, for those who look at the versions."""
    check: bool = False
    """Only say whether it is acceptable, and what is likely not meant so; nothing changes."""


class Applied(msgspec.Struct, frozen=True):
    """What was applied, or would be."""

    version: int
    """The one in force now."""
    warnings: list[str] = []
    """What is no mistake of the text but likely none of what was meant, each with line and column."""


class PolicyVersionLine(msgspec.Struct, frozen=True):
    """One version that is kept."""

    version: int
    applied_unix_s: float
    note: str
    text_bytes: int
    """Its text's size; 0 where every place took what its configuration names."""


class PolicyText(msgspec.Struct, frozen=True):
    """The text of one version."""

    version: int
    text: str | None
    """None where every place took what its configuration names; of version 0, where that is the built-ins at this router."""


class PolicyPlaceLine(msgspec.Struct, frozen=True):
    """What one place or router runs."""

    place: str
    version: int
    """0 where nothing was applied."""
    refused: int
    """The version that it could not take on; 0 where there is none."""
    reason: str


class PolicyEventLine(msgspec.Struct, frozen=True):
    """What a cluster policy ordered, and what became of it."""

    at_unix_s: float
    policy: str
    action: str
    """`raise`, `lower`, `store`, `fetch`, `let-go`, `move`, `hint`, `lapse`, `done`, `refuse` or `fail`."""
    group: str
    """The key of the first page, in hexadecimal; empty where it is about none."""
    copies: int
    reason: str
    place: str = ""
    """The place that an order about pages or a conversation was for; empty where it was for none."""
    pages: int = 0
    """How many pages an order was about, or were moved."""
    model: str = ""
    """The model that a hint was about that was given, or lapsed; empty where it is none."""
    workers: int = 0
    """How many workers that should have; 0 of a hint that lapsed."""


class PolicyEvents(msgspec.Struct, frozen=True):
    """What cluster policies did, the newest first."""

    events: list[PolicyEventLine]


class RefusedEditLine(msgspec.Struct, frozen=True):
    """The latest edit of a policy file that is watched, which is not acceptable and changed nothing."""

    file: str
    at_unix_s: float
    problems: list[str]


class PolicyReport(msgspec.Struct, frozen=True):
    """The policies of a cluster."""

    version: int
    """The one in force; 0 where nothing was applied, and every place runs what its configuration names."""
    versions: list[PolicyVersionLine]
    """The oldest first."""
    places: list[PolicyPlaceLine]
    """Those heard of in the last ten seconds."""
    refused: RefusedEditLine | None = None
    """None where no file is watched, or its latest edit took effect."""
    file_differs: str = ""
    """That the version in force is another than the policy file of the router that was asked says; empty where it is that."""
