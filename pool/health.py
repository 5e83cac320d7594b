"""What a folder can still do: take pages, only give them, or nothing.

Covers reading errors of the disk as one of three states, with a counter by reason and one line in
the log for each change. Does not cover what the tier does about it (`pie.pool.disk`).
"""

from __future__ import annotations

import enum
import errno
import logging
import math
import os
import threading
from collections import Counter
from collections.abc import Callable

from pie.pool.files import NotAFileError

log = logging.getLogger("pie.pool.disk")

RETRY_S = 30.0
"""How long a folder that refused a store is left alone before the next one tries."""
_MOST_READ_ERRORS = 3
"""In a row; then the disk is taken for lost."""

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}
_GONE = {errno.ENODEV, errno.ENXIO, errno.ENOTCONN, errno.ESTALE, errno.EUCLEAN}
_SCARCE = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR}
"""The process or the machine is short of something; the disk is well."""


class FolderState(enum.IntEnum):
    """What a folder can do."""

    OK = 0
    READ_ONLY = 1
    """It gives pages and takes none."""
    OFF = 2
    """It does not answer; until the next start."""


class Health:
    """The state of one folder. Thread-safe."""

    def __init__(self, name: str, clock: Callable[[], float]) -> None:
        """Begin well.

        Args:
            name: What log lines call the folder.
            clock: Seconds, going forward only.
        """
        self.state = FolderState.OK
        self.errors: Counter[str] = Counter()
        self._name = name
        self._clock = clock
        self._retry_at_s = 0.0
        self._read_errors = 0
        self._lock = threading.Lock()

    @property
    def takes_stores(self) -> bool:
        """Whether a store may be tried now."""
        if self.state is FolderState.READ_ONLY:
            return self._clock() >= self._retry_at_s
        return self.state is FolderState.OK

    @property
    def is_off(self) -> bool:
        """Whether the folder does not answer any more."""
        return self.state is FolderState.OFF

    def failed(self, error: OSError, doing: str, *, for_good: bool = False) -> bool:
        """Take in an error that came of `doing` (`store`, `load`, `remove`, `sync`, `open`).

        Returns whether the folder is off because of it. One that cannot be opened is off; one that
        may not take stores `for_good` is never asked to again. What has a file's name and is none is in the way
        of one page alone.
        """
        reason = _reason(error.errno)
        with self._lock:
            self.errors[reason] += 1
            in_the_way = isinstance(error, NotAFileError) and doing != "open"
            if reason == "scarce" or in_the_way or self.state is FolderState.OFF:
                return False
            if doing == "load":
                self._read_errors += 1
            is_lost = reason == "gone" or self._read_errors >= _MOST_READ_ERRORS
            if is_lost or doing == "open":
                self._change(FolderState.OFF, error, doing)
                return True
            if doing != "load":
                self._retry_at_s = math.inf if for_good else self._clock() + RETRY_S
                self._change(FolderState.READ_ONLY, error, doing)
            return False

    @staticmethod
    def is_scarce(error: OSError) -> bool:
        """Say whether an error is about the process or the machine, and not about the disk."""
        return error.errno in _SCARCE

    def worked(self, doing: str) -> None:
        """Take in that something succeeded."""
        self._read_errors = 0
        if doing == "store" and self.state is FolderState.READ_ONLY:
            with self._lock:
                if self.state is FolderState.READ_ONLY:
                    self.state = FolderState.OK
                    log.info("%s takes pages again", self._name)

    def _change(self, state: FolderState, error: OSError, doing: str) -> None:
        if state is not self.state:
            self.state = state
            what = "takes no more pages" if state is FolderState.READ_ONLY else "is off"
            log.error("%s %s: %s failed: %s", self._name, what, doing, error)


def _reason(number: int | None) -> str:
    """Return what an error number means for a folder: the name that it is counted by."""
    for reason, numbers in (
        ("no_space", _FULL),
        ("read_only", _READ_ONLY),
        ("gone", _GONE),
        ("scarce", _SCARCE),
    ):
        if number in numbers:
            return reason
    return "io" if number is None or number == errno.EIO else os.strerror(number).lower()
