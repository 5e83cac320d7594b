"""The folders of one disk tier together.

Covers which of them takes a page, reading one where it lies, and what they count in sum. Does not
cover what happens in one (`pie.pool.folder`) or which pages are there (`pie.pool.disk`).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from pie.page.errors import BadPage
from pie.page.header import PageHeader
from pie.page.key import PageKey
from pie.page.lookup import LookupStatus
from pie.pool.disk_entry import MISSING, UNREADABLE, DiskEntry
from pie.pool.folder import Folder, FoundPack, FoundPage, Home
from pie.pool.health import FolderState
from pie.pool.space import Claim
from pie.pool.tier import PageId

_MOVES = 4
"""How often a page may move to another pack while one load tries to read it."""


class Folders(tuple[Folder, ...]):
    """At least one folder. Thread-safe."""

    __slots__ = ()

    @property
    def bad_by_reason(self) -> Counter[str]:
        """How many pages were found bad or not at all, by reason."""
        return sum((folder.bad_pages for folder in self), Counter())

    @property
    def errors(self) -> Counter[str]:
        """How often a disk refused something, by reason."""
        return sum((folder.health.errors for folder in self), Counter())

    @property
    def any_off(self) -> bool:
        """Whether one does not answer any more."""
        return any(folder.health.is_off for folder in self)

    def states(self) -> Counter[str]:
        """Return how many are in which state."""
        states = Counter({state.name.lower(): 0 for state in FolderState})
        states.update(folder.health.state.name.lower() for folder in self)
        return states

    def open(self, lock_timeout_s: float) -> Iterator[FoundPage | FoundPack]:
        """Take all into use, and then list what is in them; one that cannot be used is off.

        Raises:
            FolderInUseError: Another process uses one, and still does after `lock_timeout_s`.
        """
        try:
            used = [folder for folder in self if folder.open(lock_timeout_s)]
            return itertools.chain.from_iterable(map(_scan, used))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Bring what was written to the disks and let other processes have the folders."""
        for folder in self:
            folder.close()

    def takers(self) -> list[Folder]:
        """Return those that may be tried with a store now."""
        return [folder for folder in self if folder.health.takes_stores]

    def store(
        self,
        header: PageHeader,
        payload: memoryview,
        claim: Claim,
        kept_back_bytes: int,
        failed: Callable[[Folder, OSError, str], object],
    ) -> Home | None:
        """Write a page into the first folder that takes it, the one of its key before others.

        Args:
            header: What names the page.
            payload: What is written.
            claim: Takes what is written.
            kept_back_bytes: What a disk must have left afterwards.
            failed: Told which folder refused it.
        """
        for folder in self._in_order(header.key):
            wanted = claim.left_bytes + kept_back_bytes
            if not folder.health.takes_stores or not folder.has_room(wanted):
                continue
            try:
                home = folder.store(header, payload, claim)
            except OSError as error:
                failed(folder, error, "store")
            else:
                if home is not None:
                    return home
        return None

    @staticmethod
    def load(
        entry: DiskEntry, failed: Callable[[Folder, OSError, str], object]
    ) -> memoryview | LookupStatus | str:
        """Return a payload, or a status that says why not, or what is wrong with the page.

        Args:
            entry: Says where the page lies, and may say otherwise meanwhile.
            failed: Told which folder could not be read.
        """
        for _ in range(_MOVES):
            home = entry.home
            assert home is not None
            try:
                return home.folder.load(entry.header, home)
            except BadPage as error:
                return error.reason.value
            except FileNotFoundError:
                if entry.home is home:
                    return MISSING
            except OSError as error:
                failed(home.folder, error, "load")
                if home.folder.health.is_scarce(error):
                    return LookupStatus.RETRY
                return UNREADABLE
        return LookupStatus.RETRY

    def keep_uses(
        self, uses: Mapping[PageId, int], failed: Callable[[Folder, OSError, str], object]
    ) -> None:
        """Write the file of uses into the first folder that has room for it."""
        for folder in self.takers():
            try:
                if folder.keep_uses(uses):
                    return
            except OSError as error:
                failed(folder, error, "store")

    def kept_uses(self, failed: Callable[[Folder, OSError, str], object]) -> dict[PageId, int]:
        """Return what the files of uses say: there are several where a folder did not take it at times."""
        uses: dict[PageId, int] = {}
        for folder in self:
            try:
                uses |= {} if folder.health.is_off else folder.kept_uses()
            except OSError as error:
                failed(folder, error, "load")
        return uses

    def _in_order(self, key: PageKey) -> Iterator[Folder]:
        """Name the folder that a page belongs in, and then the others."""
        start = int.from_bytes(key[:4]) % len(self)
        yield from self[start:]
        yield from self[:start]


def _scan(folder: Folder) -> Iterator[FoundPage | FoundPack]:
    try:
        yield from folder.scan()
    except OSError as error:
        folder.health.failed(error, "open")
