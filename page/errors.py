"""What can go wrong with pages.

    PageError
    └── BadPage     bytes that are not the page that they should be, and why

A bad page is a miss: whoever reads it counts the reason, removes it and goes on. One that is `LOCKED`
is a miss too, and stays where it is.
"""

from __future__ import annotations

import enum


class BadPageReason(enum.StrEnum):
    """Why bytes are not the page that they should be."""

    TRUNCATED = "truncated"
    NOT_A_PAGE = "not_a_page"
    VERSION = "version"
    """Written by a later or an earlier Pie."""
    HEADER = "header"
    """The header was changed, or a field is missing or makes no sense."""
    CODEC = "codec"
    """The codec is unknown or cannot read the payload."""
    CHECKSUM = "checksum"
    """The payload is not the one that was written."""
    FOREIGN = "foreign"
    """Written without the cluster's secret, or with a secret where this cluster has none."""
    WRONG_PAGE = "wrong_page"
    """A whole page, but not the one that was asked for."""
    OTHER_MODEL = "other_model"
    """A whole page of another model, dtype or layout, where only one model's pages are kept."""
    LOCKED = "locked"
    """Encrypted with a key that is not here. Not damaged: whoever has the key can read it."""


class PageError(Exception):
    """Anything that went wrong with pages."""


class BadPage(PageError):  # noqa: N818 - a finding about bytes, named as people say it
    """Bytes that are not the page that they should be."""

    def __init__(self, reason: BadPageReason, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.reason.value}: {self.detail}"
