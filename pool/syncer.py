"""Bringing files to the disk a moment after they were written.

Covers durability `batch`: what was written within a second is synced together, off the threads
that write. Does not cover `always`, which each write does itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from pie.pool.files import Files

INTERVAL_S = 1.0
_MOST_WAITING = 4096
"""Files; from then on whoever adds more syncs them himself."""


class Syncer:
    """One thread that syncs what it was told of, once a second."""

    def __init__(
        self,
        files: Files,
        on_error: Callable[[Path, OSError], object],
        interval_s: float = INTERVAL_S,
    ) -> None:
        """Start the thread.

        Args:
            files: Does the work.
            on_error: Told what could not be synced, on any thread.
            interval_s: How long a file waits at most before it is synced.
        """
        self._files = files
        self._on_error = on_error
        self._interval_s = interval_s
        self._waiting: dict[Path, None] = {}
        self._folders: dict[Path, None] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pie-disk-sync", daemon=True)
        self._thread.start()

    def add(self, files: Iterable[Path], folders: Iterable[Path] = ()) -> None:
        """Sync files, and then the folders that name them, soon."""
        with self._lock:
            self._waiting.update(dict.fromkeys(files))
            self._folders.update(dict.fromkeys(folders))
            is_too_many = len(self._waiting) > _MOST_WAITING
        if is_too_many:
            self.flush()

    def flush(self) -> None:
        """Sync what waits, now."""
        with self._lock:
            files, self._waiting = self._waiting, {}
            folders, self._folders = self._folders, {}
        for path in (*files, *folders):
            try:
                self._files.sync(path)
            except OSError as error:
                self._on_error(path, error)

    def close(self) -> None:
        """Sync what waits and end the thread."""
        self._stop.set()
        self._thread.join()
        self.flush()

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            self.flush()
