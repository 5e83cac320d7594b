from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pie.page.events import Part
from pie.page.key import PageKey
from pie.policies.manager import RetentionManager
from pie.worker.page_table import FrozenPage, PageTable

TOTAL = 8


def key(number: int) -> PageKey:
    return PageKey(bytes([number]) * 32)


def frozen(number: int, parent: int | None = None) -> FrozenPage:
    return FrozenPage(key(number), b"root" if parent is None else key(parent), number)


def make_table(total: int = TOTAL) -> PageTable:
    return PageTable(total, page_bytes=100, part=Part.FULL, retention=RetentionManager())


def hold(table: PageTable, *numbers: int) -> list[int]:
    """Freeze a chain of keys and return its pages."""
    pages = table.allocate(len(numbers), 0)
    assert pages is not None
    parents = [None, *numbers[:-1]]
    return [
        table.freeze(page, frozen(number, parent), 0)
        for page, number, parent in zip(pages, numbers, parents, strict=True)
    ]


@pytest.fixture
def table() -> Iterator[PageTable]:
    table = make_table()
    yield table
    table.check()


def test_matches_the_leading_run(table: PageTable) -> None:
    pages = hold(table, 1, 2, 3)
    assert table.match([key(1), key(2), key(9), key(3)], 1) == pages[:2]


def test_matching_changes_nothing(table: PageTable) -> None:
    pages = hold(table, 1, 2)
    table.release(pages[1:])
    held = table.matching([key(1), key(2), key(3)])
    assert (held.pages, held.idle) == (2, 1)
    table.check([pages[:1]])


def test_a_frozen_page_without_users_stays_cached(table: PageTable) -> None:
    table.release(hold(table, 1, 2))
    assert table.counts().idle == 2
    assert table.available == TOTAL
    assert len(table.match([key(1), key(2)], 1)) == 2


def test_a_writable_page_without_users_is_free(table: PageTable) -> None:
    pages = table.allocate(3, 0)
    assert pages is not None
    table.release(pages)
    assert table.counts().free == TOTAL


def test_evicts_idle_pages_only_when_pages_run_out(table: PageTable) -> None:
    table.release(hold(table, 1, 2, 3, 4))
    table.take_changes()
    assert table.allocate(TOTAL - 4, 0) is not None
    assert not table.take_changes()
    assert table.evicted == 0
    assert table.allocate(1, 0) is not None
    assert table.evicted == 1
    (change,) = table.take_changes()
    assert not change.stored
    assert change.page.key == key(4), "the tail goes before what it needs"


def test_allocates_all_or_nothing(table: PageTable) -> None:
    hold(table, 1, 2, 3)
    assert table.allocate(TOTAL - 2, 0) is None
    assert table.counts().free == TOTAL - 3
    assert not [change for change in table.take_changes() if not change.stored]


def test_a_sibling_of_the_same_key_wins(table: PageTable) -> None:
    first = hold(table, 1)
    second = table.allocate(1, 0)
    assert second is not None
    assert table.freeze(second[0], frozen(1), 0) == first[0]
    assert table.counts().free == TOTAL - 1
    table.check([first, first])
    assert len(table.take_changes()) == 1


def test_a_loading_page_cannot_go(table: PageTable) -> None:
    pages = table.allocate(1, 0)
    assert pages is not None
    table.begin_load(pages)
    with pytest.raises(AssertionError, match="while a load writes it"):
        table.release(pages)
    table.end_load(pages)
    table.release(pages)
    assert table.counts().free == TOTAL


def test_a_page_cannot_be_matched_before_it_is_frozen(table: PageTable) -> None:
    pages = table.allocate(1, 0)
    assert pages is not None
    table.begin_load(pages)
    assert table.match([key(1)], 0) == []
    table.end_load(pages)
    table.freeze(pages[0], frozen(1), 0)
    assert table.match([key(1)], 0) == pages


def test_users_of_one_page_are_counted(table: PageTable) -> None:
    pages = hold(table, 1)
    table.acquire(pages[0])
    table.release(pages)
    assert table.counts().in_use == 1
    table.release(pages)
    assert table.counts().idle == 1
    with pytest.raises(AssertionError, match="released too often"):
        table.release(pages)


def test_check_finds_a_lost_user(table: PageTable) -> None:
    pages = hold(table, 1)
    table.check([pages])
    with pytest.raises(AssertionError, match="users"):
        table.check([])


class Below:
    """What is below, in a set."""

    def __init__(self, waiting: int, *held: int) -> None:
        self.waiting = waiting
        self.held = {key(number) for number in held}
        self.left: list[PageKey] = []
        self.kept: list[PageKey] = []

    def holds(self, key: PageKey) -> bool:
        return key in self.held

    def demote(self, victims: Sequence[tuple[int, FrozenPage]]) -> None:
        self.left += [page.key for _, page in victims]

    def keep(self, uses: Mapping[PageKey, int]) -> None:
        self.kept += uses


def test_what_leaves_is_told_while_it_is_there(table: PageTable) -> None:
    table.below = below = Below(0)
    table.release(hold(table, 1, 2))
    assert table.allocate(TOTAL - 1, 1) is not None
    assert below.left == [key(2)]


def test_while_pages_wait_to_be_copied_those_that_were_leave_first(table: PageTable) -> None:
    table.below = below = Below(2, 1, 2)
    table.release(hold(table, 1, 2, 3, 4))
    assert table.allocate(TOTAL - 2, 1) is not None
    assert below.left == [key(2), key(1)]
    assert table.allocate(2, 1) is not None
    assert below.left[2:] == [key(4), key(3)]


def test_one_that_another_needs_leaves_later_where_there_is_a_choice(table: PageTable) -> None:
    table.below = below = Below(4, 1, 3, 4)
    table.release(hold(table, 1, 2))
    table.release(hold(table, 3, 4))
    assert table.allocate(TOTAL - 4 + 2, 1) is not None
    assert below.left == [key(4), key(3)], "the end of the first needs what is before it"
    assert table.allocate(1, 1) is not None
    assert below.left[2:] == [key(1)], "the end would be lost"


class PageTableMachine(RuleBasedStateMachine):
    """A table against a plain model: who uses what, and which keys the changes say are held."""

    def __init__(self) -> None:
        super().__init__()
        self.table = make_table()
        self.now_s = 0.0
        self.frozen: list[tuple[int, list[int]]] = []
        """Number of the chain's last key and the pages of each user."""
        self.writable: list[list[int]] = []
        self.loading: list[list[int]] = []
        self.held: set[PageKey] = set()

    def _tick(self) -> float:
        self.now_s += 1
        return self.now_s

    @rule(count=st.integers(1, TOTAL))
    def allocate(self, count: int) -> None:
        fits = count <= self.table.available
        pages = self.table.allocate(count, self._tick())
        assert (pages is not None) == fits
        if pages is not None:
            self.writable.append(pages)

    @precondition(lambda self: self.writable)
    @rule(number=st.integers(0, 12))
    def freeze(self, number: int) -> None:
        pages = self.writable.pop(0)
        kept = self.table.freeze(
            pages[0], frozen(number, number - 1 if number else None), self._tick()
        )
        self.frozen.append((number, [kept]))
        if pages[1:]:
            self.writable.append(pages[1:])

    @rule(start=st.integers(0, 12), count=st.integers(1, 4))
    def match(self, start: int, count: int) -> None:
        numbers = range(start, start + count)
        pages = self.table.match([key(number) for number in numbers], self._tick())
        assert len(pages) == next(
            (i for i, n in enumerate(numbers) if key(n) not in self.held), count
        )
        if pages:
            self.frozen.append((start + len(pages) - 1, pages))

    @precondition(lambda self: self.frozen)
    @rule(data=st.data())
    def release_frozen(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.frozen) - 1))
        self.table.release(self.frozen.pop(at)[1])

    @precondition(lambda self: self.writable)
    @rule()
    def release_writable(self) -> None:
        self.table.release(self.writable.pop())

    @precondition(lambda self: self.writable)
    @rule()
    def begin_load(self) -> None:
        pages = self.writable.pop(0)
        self.table.begin_load(pages)
        self.loading.append(pages)

    @precondition(lambda self: self.loading)
    @rule()
    def end_load(self) -> None:
        pages = self.loading.pop(0)
        self.table.end_load(pages)
        self.writable.append(pages)

    @invariant()
    def agrees_with_the_model(self) -> None:
        for change in self.table.take_changes():
            (self.held.add if change.stored else self.held.remove)(change.page.key)
        users = [pages for _, pages in self.frozen]
        self.table.check([*users, *self.writable, *self.loading])
        # What is used stays.
        for number, pages in self.frozen:
            assert self.table.holds(pages[-1], key(number))


TestPageTableMachine = PageTableMachine.TestCase
TestPageTableMachine.settings = settings(max_examples=150, stateful_step_count=40)
