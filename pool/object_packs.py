"""Who owns what lies in packs: which pack a page belongs to, and when a pack goes.

Covers the packs that a node knows in a bucket, and what is alive in each. Does not cover pages
(`pie.pool.object_table`), bytes of packs (`pie.pool.object_pages`) or moving what is alive
(`pie.pool.object_compaction`). Does no I/O; whoever calls holds the table's lock.

Nodes that share a bucket and store the same pages each put them into packs of their own. All nodes
agree without a word on which copy counts: the one in the object whose name sorts first. Whoever
moves a page to another pack names that pack so that it sorts before the old one, so the first copy
never goes but with its page: a copy that counts for nobody is the only one that may go by itself.
Such a pack stays for some looks at the bucket, so that nodes that read from it have seen the others
by then. A pack of which all pages were removed goes at once, whoever wrote it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from pie.pool.object_entry import ObjectHome, ObjectPack
from pie.pool.object_removals import Removals
from pie.pool.space import Space


class Packs:
    """The packs of one bucket, as one node knows them."""

    def __init__(
        self, space: Space, removals: Removals, spare_s: float, clock: Callable[[], float]
    ) -> None:
        """Begin with none.

        Args:
            space: What bytes are given back to.
            removals: Takes the names of packs that are to go.
            spare_s: How long a pack stays whose pages all lie in others too.
            clock: Seconds, going forward only.
        """
        self._space = space
        self._removals = removals
        self._spare_s = spare_s
        self._clock = clock
        self._packs: dict[str, ObjectPack] = {}
        self._half_dead: dict[str, ObjectPack] = {}
        self._spare: dict[str, float] = {}
        """Packs whose pages all lie in others too, each with when that was found."""

    def __contains__(self, name: str) -> bool:
        return name in self._packs

    @property
    def has_half_dead(self) -> bool:
        """Whether packs wait to be emptied."""
        return bool(self._half_dead)

    def came(self, pack: ObjectPack, scan: int) -> None:
        """Take in a pack that is in the bucket and whose bytes are counted; `settle` it at the end."""
        pack.scan = scan
        self._packs[pack.name] = pack

    def take(self, home: ObjectHome) -> None:
        """Count in a page that lies in a pack."""
        assert home.pack is not None
        home.pack.live_bytes += home.length
        home.pack.live_pages += 1

    def leave(self, home: ObjectHome) -> None:
        """Count out a page that was removed, or has moved."""
        assert home.pack is not None
        home.pack.live_bytes -= home.length
        home.pack.live_pages -= 1
        self.settle(home.pack)

    def settle(self, pack: ObjectPack) -> None:
        """Decide what becomes of a pack after pages came or left."""
        if pack.is_leaving:
            return
        if pack.live_pages:
            if pack.is_half_dead:
                self._half_dead[pack.name] = pack
        elif pack.has_spares:
            self._spare.setdefault(pack.name, self._clock())
        else:
            self._retire(pack)

    def forget_gone(self, scan: int, seen: Collection[str]) -> None:
        """Forget packs that a look has not `seen` and that were there before it began."""
        for name, pack in list(self._packs.items()):
            if pack.scan < scan and name not in seen:
                self._drop(pack)
                self._space.give(pack.size)

    def take_half_dead(self) -> list[ObjectPack]:
        """Return packs that are half dead, to be emptied, each once."""
        packs, self._half_dead = self._half_dead, {}
        return list(packs.values())

    def retire_spare(self, *, for_room: bool = False) -> bool:
        """Let packs go that have been spare for long, or all of them `for_room`; say whether any went."""
        until_s = self._clock() - self._spare_s
        gone = [name for name, since_s in self._spare.items() if for_room or since_s <= until_s]
        for name in gone:
            self._retire(self._packs[name])
        return bool(gone)

    def check(self, alive: dict[str, int]) -> None:
        """Assert that counts agree with the pages that are `alive` in each pack."""
        for name, pack in self._packs.items():
            assert not pack.is_leaving
            assert 0 <= pack.live_bytes <= pack.size
            assert (pack.live_pages == 0) == (pack.live_bytes == 0)
            assert (pack.live_pages == 0) == (name in self._spare)
            assert alive.get(name, 0) <= pack.live_pages
        assert self._spare.keys() <= self._packs.keys()
        assert self._half_dead.keys() <= self._packs.keys()

    def _retire(self, pack: ObjectPack) -> None:
        self._drop(pack)
        self._removals.add(pack.name, pack.size)

    def _drop(self, pack: ObjectPack) -> None:
        pack.is_leaving = True
        del self._packs[pack.name]
        self._half_dead.pop(pack.name, None)
        self._spare.pop(pack.name, None)
