"""What an object store answers when it does not do what it was asked.

Covers the reasons. Does not cover what S3 calls them (`pie.pool.object_s3`) or what the tier
makes of them (`pie.pool.object_health`).
"""

from __future__ import annotations

import enum

from pie.pool.errors import PoolError


class StoreFailure(enum.StrEnum):
    """Why an object store did not do something."""

    UNREACHABLE = "unreachable"
    """Nobody answers there, or the connection broke."""
    TIMEOUT = "timeout"
    BUSY = "busy"
    """It has too much to do, or something in it failed; later it may do better."""
    DENIED = "denied"
    """Credentials are missing, wrong, or not enough."""
    NO_BUCKET = "no_bucket"
    TLS = "tls"
    """Its certificate is not one that is trusted."""
    STRANGE = "strange"
    """It refused, or answered in a way that no S3 does."""


class ObjectStoreError(PoolError):
    """An object store did not do what it was asked; `failure` says why."""

    def __init__(self, failure: StoreFailure, detail: str) -> None:
        super().__init__(failure, detail)
        self.failure = failure
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.failure.value}: {self.detail}"


class NotAskedError(ObjectStoreError):
    """So much waits for the object store already that it was not asked: no word about the store."""
