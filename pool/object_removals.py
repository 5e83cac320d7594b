"""Objects that are to go, and names that a request is about now.

Covers which, and the bytes that they take until they are gone. Does not cover why they go
(`pie.pool.object_table`) or the requests (`pie.pool.object_writer`).

Requests for one name are made one after another: the removal of an object never overtakes the next
one of its name.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping

from pie.pool.space import Space


class Removals:
    """What is to go from one bucket. Thread-safe."""

    def __init__(self, space: Space) -> None:
        """Begin with nothing to remove.

        Args:
            space: What bytes are given back to.
        """
        self._space = space
        self._sizes: dict[str, int] = {}
        self._bytes = 0
        self._busy: set[str] = set()
        self._changed = threading.Condition()

    def __len__(self) -> int:
        """Return how many objects wait to be removed."""
        return len(self._sizes)

    @property
    def bytes(self) -> int:
        """Bytes in the bucket that nobody wants any more, until they are gone."""
        return self._bytes

    def add(self, name: str, size: int) -> None:
        """Have an object removed soon that takes `size` bytes."""
        with self._changed:
            self._sizes[name] = self._sizes.get(name, 0) + size
            self._bytes += size

    def is_about(self, name: str) -> bool:
        """Say whether an object is about to go, or a request is about it now."""
        with self._changed:
            return name in self._sizes or name in self._busy

    @contextlib.contextmanager
    def alone(self, name: str) -> Iterator[None]:
        """Keep other requests from being about the same name."""
        with self._changed:
            # Whoever has it ends by the store's time-outs.
            self._changed.wait_for(lambda: name not in self._busy)
            self._busy.add(name)
        try:
            yield
        finally:
            self._end([name])

    @contextlib.contextmanager
    def due(self, most: int) -> Iterator[dict[str, int]]:
        """Give out what nobody is about now, so many at most; it is there again if that fails."""
        with self._changed:
            waiting = ((name, size) for name, size in self._sizes.items() if name not in self._busy)
            some = dict(pair for pair, _ in zip(waiting, range(most), strict=False))
            for name in some:
                del self._sizes[name]
            self._busy.update(some)
        try:
            with self._removing(some):
                yield some
        finally:
            self._end(some)

    @contextlib.contextmanager
    def before(self, name: str) -> Iterator[bool]:
        """Say whether an object is to go before another one takes its name; the caller is `alone`."""
        with self._changed:
            size = self._sizes.pop(name, None)
        with self._removing({} if size is None else {name: size}):
            yield size is not None

    def check(self) -> None:
        """Assert that the sums are right."""
        with self._changed:
            assert self._bytes >= sum(self._sizes.values())
            assert self._busy or self._bytes == sum(self._sizes.values())

    @contextlib.contextmanager
    def _removing(self, some: Mapping[str, int]) -> Iterator[None]:
        try:
            yield
        except BaseException:
            with self._changed:
                for name, size in some.items():
                    self._sizes[name] = self._sizes.get(name, 0) + size
            raise
        size = sum(some.values())
        self._space.give(size)
        with self._changed:
            self._bytes -= size

    def _end(self, names: Mapping[str, int] | list[str]) -> None:
        with self._changed:
            self._busy.difference_update(names)
            self._changed.notify_all()
