"""Why pages that a prompt could have used are not in device memory, as far as a worker knows.

Covers a bounded memory of the keys of pages that left, or that were computed in a way that gave them
no key. Does not cover loads that were weighed or failed (`pie.worker.load_choice`) or what a router
makes of it (`pie.router.misses`). Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence as Many
from itertools import groupby

from pie.page.key import PageKey
from pie.wire.messages import MissedPages, MissReason
from pie.worker.page_table import Change
from pie.worker.sequence import Sequence

_MOST_KEYS = 65_536
"""About 10 MB: a key of 32 bytes and its place in a dictionary."""
_MOST_RUNS = 64
"""Runs that one request tells of; what follows counts as the last one does."""


class Departed:
    """Remembers keys, the latest first to be known. Belongs to the step thread.

    Args:
        states_alone: Whether snapshots are all that the model's pages have.
        most_keys: How many are remembered.
    """

    def __init__(self, *, states_alone: bool = False, most_keys: int = _MOST_KEYS) -> None:
        self._states_alone = states_alone
        self._most_keys = most_keys
        # In the order in which they left.
        self._reasons: dict[PageKey, MissReason] = {}

    def __len__(self) -> int:
        return len(self._reasons)

    def apply(self, changes: Iterable[Change], opaque: Iterable[PageKey] = ()) -> None:
        """Take in what the page table did, and keys that pages will not have."""
        for change in changes:
            if change.is_state is not self._states_alone:
                continue
            self._reasons.pop(change.page.key, None)
            if not change.stored:
                self._remember(change.page.key, MissReason.EVICTED)
        for key in opaque:
            self._reasons.pop(key, None)
            self._remember(key, MissReason.OPAQUE)

    def note(self, sequence: Sequence, *, held: Callable[[PageKey], bool]) -> None:
        """Note what a sequence finds when its first turn comes; later ones change nothing."""
        if sequence.missed is None:
            working_set = sequence.working_set
            sequence.missed_from = working_set.frozen
            sequence.missed = self.runs(working_set.keys[working_set.frozen :], held=held)

    def runs(
        self, keys: Many[PageKey], *, held: Callable[[PageKey], bool]
    ) -> tuple[MissedPages, ...]:
        """Return why each of `keys` must be computed, in runs of one reason.

        `held` says of a page whether it is there all the same: a recurrent model lacks the snapshot
        that it would go on from.
        """
        reasons = self._reasons

        def reason(key: PageKey) -> MissReason:
            found = reasons.get(key)
            if found is not None:
                return found
            return MissReason.NO_SNAPSHOT if held(key) else MissReason.NEVER_COMPUTED

        found = [(one, sum(1 for _ in run)) for one, run in groupby(map(reason, keys))]
        told = [MissedPages(one, pages) for one, pages in found[:_MOST_RUNS]]
        if left := sum(pages for _, pages in found[_MOST_RUNS:]):
            told[-1] = MissedPages(told[-1].reason, told[-1].pages + left)
        return tuple(told)

    def _remember(self, key: PageKey, reason: MissReason) -> None:
        self._reasons[key] = reason
        if len(self._reasons) > self._most_keys:
            del self._reasons[next(iter(self._reasons))]
