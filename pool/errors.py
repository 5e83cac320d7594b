"""What goes wrong in the pool by a caller's mistake.

A page that is not there, no longer fits or went bad is a value, never an error.

    PoolError
    ├── NotPreparedError    a store or load was completed that nobody prepared
    ├── NoArenaError        the machine does not give the memory that the budget asks for
    ├── NotSharedError      memory of another process cannot be written to
    ├── FolderInUseError    another process keeps its pages in this folder
    └── ObjectStoreError    a bucket did not do what it was asked (`pie.pool.object_errors`)
        └── NotAskedError   so much waits for it that it was not asked
"""

from __future__ import annotations


class PoolError(Exception):
    """Anything raised by `pie.pool`."""


class NotPreparedError(PoolError):
    """A store or load was completed that nobody prepared."""


class NoArenaError(PoolError):
    """The machine does not give the memory that the budget asks for."""


class NotSharedError(PoolError):
    """Memory of another process cannot be written to, or is not what that process means."""


class FolderInUseError(PoolError):
    """Another process keeps its pages in this folder."""
