"""Policies whose queues take turns propose many pages as they would propose one after the other."""

from collections.abc import Sequence

from hypothesis import given, strategies as st

from pie.page.events import Part
from pie.policies.arc import ArcRetention
from pie.policies.manager import RetentionManager
from pie.policies.s3_fifo import S3FifoRetention
from tests.policies.pages import key, number, view

Script = Sequence[tuple[int, int]]
"""Pages that are stored, in order, and how often each is used; some come back after they left."""
SCRIPTS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 4)), min_size=1, max_size=80)


class PlainS3Fifo:
    """The published algorithm over pages that stand alone; capacity is what is held."""

    def __init__(self) -> None:
        self.small: list[int] = []
        self.main: list[int] = []
        self.uses: dict[int, int] = {}
        self.left: list[int] = []
        """Those that left the small queue, the latest last."""

    def store(self, page: int, uses: int) -> None:
        if page not in self.uses:
            is_ghost = page in self.left and len(self.left) - self.left.index(page) - 1 <= len(
                self.main
            )
            (self.main if is_ghost else self.small).append(page)
            if page in self.left:
                self.left[self.left.index(page)] = -1
            self.uses[page] = 0
        else:
            uses += 1
        self.uses[page] = min(3, self.uses[page] + uses)

    def evict(self, capacity: int, new: int) -> int:
        """Take the next victim, where `new` pages have come in place of those before it."""
        while True:
            if self.small and (len(self.small) + new > 0.1 * capacity or not self.main):
                page = self.small.pop(0)
                if self.uses[page] < 2:
                    self.left.append(page)
                    break
                self.uses[page] = 0
                self.main.append(page)
            else:
                page = self.main.pop(0)
                if not self.uses[page]:
                    break
                self.uses[page] -= 1
                self.main.append(page)
        del self.uses[page]
        return page


@given(script=SCRIPTS, evicting=st.lists(st.integers(0, 12), max_size=80))
def test_s3_fifo_is_the_published_one(script: Script, evicting: list[int]) -> None:
    manager, model = RetentionManager(S3FifoRetention()), PlainS3Fifo()
    for at, (page, uses) in enumerate(script):
        manager.stored(view(page), 0.0)
        for _ in range(uses):
            manager.hit(key(page), Part.FULL, 0.0)
        model.store(page, uses)
        wanted = evicting[at] if at < len(evicting) else 0
        if not wanted:
            continue
        capacity = len(manager)
        left = [number(one) for one in manager.victims(wanted, 0.0)]
        assert left == [model.evict(capacity, new) for new in range(min(wanted, capacity))]
        for one in left:
            manager.removed(key(one), Part.FULL)
        manager.check()


@given(script=SCRIPTS, count=st.integers(1, 20), target=st.floats(0, 40))
def test_arc_replaces_one_page_after_the_other(script: Script, count: int, target: float) -> None:
    policy = ArcRetention()
    manager = RetentionManager(policy)
    once: list[int] = []
    again: list[int] = []
    for page, hits in script:
        manager.stored(view(page), 0.0)
        for _ in range(hits):
            manager.hit(key(page), Part.FULL, 0.0)
        uses = hits + (page in once or page in again)
        if page in once and uses:
            once.remove(page)
        if page in again:
            again.remove(page)
        if uses or page not in once:
            (again if uses else once).append(page)
    policy._target = target
    expected = []
    for new in range(min(count, len(once) + len(again))):
        is_first = once and (len(once) + new > target or not again)
        expected.append((once if is_first else again).pop(0))
    assert [number(one) for one in manager.victims(count, 0.0)] == expected
