"""Saying once that something does not work, and once that it does again.

Covers lines in the log about what is tried again and again. Does not cover trying
(`pie.index.client`).
"""

from __future__ import annotations

import logging


class Trouble:
    """One thing that works or does not.

    Args:
        log: Where a change is said.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._there = False

    def begins(self, message: str, *args: object) -> None:
        """Warn, unless that was done already."""
        if not self._there:
            self._log.warning(message, *args)
        self._there = True

    def ends(self, message: str, *args: object) -> None:
        """Say that it works again, where it did not."""
        if self._there:
            self._log.info(message, *args)
        self._there = False
