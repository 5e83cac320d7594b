"""Physical bytes on disk against their cap.

Covers taking room before something is written and settling it afterwards. Does not cover what the
bytes are (`pie.pool.folder`, `pie.pool.packs`).
"""

from __future__ import annotations

import threading


class Space:
    """So many bytes may be taken. Thread-safe."""

    def __init__(self, budget_bytes: int, kept_back_bytes: int = 0) -> None:
        """Begin with nothing taken.

        Args:
            budget_bytes: Never exceeded by what is taken.
            kept_back_bytes: The last of it, only for those who are about to free more.
        """
        self.budget_bytes = budget_bytes
        self._kept_back = kept_back_bytes
        self._used = 0
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        """Bytes taken now, claims included."""
        return self._used

    def claim(self, size: int, *, may_use_last: bool = False) -> Claim | None:
        """Take bytes for what is about to be written; None where they are not there."""
        limit = self.budget_bytes - (0 if may_use_last else self._kept_back)
        return Claim(self, size) if self._take(size, limit) else None

    def take(self, size: int) -> bool:
        """Take bytes, the last ones too; say whether they were there."""
        return self._take(size, self.budget_bytes)

    def give(self, size: int) -> None:
        """Give bytes back."""
        with self._lock:
            assert self._used >= size
            self._used -= size

    def found(self, size: int) -> None:
        """Count bytes that are there already, over the cap if it must be."""
        with self._lock:
            self._used += size

    def _take(self, size: int, limit: int) -> bool:
        with self._lock:
            if self._used + size > limit:
                return False
            self._used += size
            return True


class Claim:
    """Bytes taken for one store, until what it really takes is known. For one thread at a time."""

    def __init__(self, space: Space, size: int) -> None:
        self._space = space
        self.left_bytes = size

    def spend(self, size: int) -> bool:
        """Let something have bytes of the claim for good, or give it some where `size` is below 0.

        Returns whether they were there; where a claim is too small, others may have left some.
        """
        if size < 0:
            self._space.give(-size)
            return True
        missing = size - self.left_bytes
        if missing > 0:
            if not self._space.take(missing):
                return False
            self.left_bytes += missing
        self.left_bytes -= size
        return True

    def close(self) -> None:
        """Give back what was not spent."""
        left, self.left_bytes = self.left_bytes, 0
        self._space.give(left)
