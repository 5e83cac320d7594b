"""The suite that every tier passes.

Covers the contract of `pie.pool.tier`: sentences as tests, many threads at once, and a state
machine against a plain dict. Does not cover what only one tier promises. Needs pytest and
hypothesis.

To test a tier of your own, say how to make it and how to damage what it holds:

    class TestMyTier(TierConformance):
        def make_tier(self, budget_bytes):
            return MyTier(budget_bytes)

        def damage(self, tier, page):
            ...


    TestMyTierAgainstADict = tier_machine(MyTier).TestCase
"""

# ruff: noqa: D102 - a test's name is its sentence

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from blake3 import blake3
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pie.page.events import Part
from pie.page.header import PageHeader
from pie.page.key import PageKey, RootKey
from pie.page.lookup import LookupStatus
from pie.pool.checksum import Checksum
from pie.pool.errors import NotPreparedError
from pie.pool.tier import PageId, StoredPage, Tier, id_of

BUDGET_BYTES = 1 << 20
PAGE_BYTES = 64 << 10


def sample_page(
    number: int,
    size: int = PAGE_BYTES,
    *,
    part: Part = Part.FULL,
    parent: int | None = None,
    secret: bytes | None = None,
) -> tuple[PageHeader, bytes]:
    """Return the page with a number: always the same header and payload for the same arguments."""
    payload = random.Random(f"{number}/{part}/{size}").randbytes(size)
    header = PageHeader(
        key=sample_key(number),
        parent=sample_key(-1 if parent is None else parent),
        index=0 if parent is None else parent + 1,
        part=part,
        model_root=RootKey(bytes(32)),
        dtype="float32",
        layout_id="0" * 32,
        page_tokens=16,
        raw_bytes=size,
        checksum=Checksum(secret).digest(payload),
    )
    return header, payload


def sample_key(number: int) -> PageKey:
    """Return the key of the page with a number."""
    return PageKey(blake3(str(number).encode()).digest())


def put(tier: Tier, header: PageHeader, payload: bytes) -> bool:
    """Store a page in both phases; say whether it is readable now."""
    room = tier.prepare_store(header)
    if not isinstance(room, memoryview):
        return False
    room[:] = payload
    return tier.complete_store(id_of(header), success=True)


def read(tier: Tier, page: PageId) -> bytes | LookupStatus:
    """Load a page in both phases and return a copy of its payload."""
    stored = tier.prepare_load(page)
    if not isinstance(stored, StoredPage):
        return stored
    try:
        return bytes(stored.payload)
    finally:
        tier.complete_load(page)


class TierConformance:
    """What holds for every tier. Override `make_tier` and `damage`."""

    def make_tier(self, budget_bytes: int) -> Tier:
        """Return an empty tier."""
        raise NotImplementedError

    def damage(self, tier: Tier, page: PageId) -> None:
        """Change a bit of a page's payload where the tier keeps it."""
        raise NotImplementedError

    @pytest.fixture
    def tier(self) -> Iterator[Tier]:
        """A tier with room for about 15 sample pages."""
        tier = self.make_tier(BUDGET_BYTES)
        yield tier
        tier.check()
        tier.close()

    def test_a_stored_page_comes_back_as_it_was(self, tier: Tier) -> None:
        header, payload = sample_page(1)
        assert put(tier, header, payload)
        stored = tier.prepare_load(id_of(header))
        assert isinstance(stored, StoredPage)
        assert stored.header == header
        assert stored.payload == payload
        tier.complete_load(id_of(header))

    def test_a_page_is_unreadable_until_its_store_is_complete(self, tier: Tier) -> None:
        header, payload = sample_page(1)
        page = id_of(header)
        room = tier.prepare_store(header)
        assert isinstance(room, memoryview)
        room[:] = payload
        assert tier.lookup(page) is LookupStatus.PENDING
        assert tier.prepare_load(page) is LookupStatus.PENDING
        assert list(tier.pages()) == []
        assert tier.complete_store(page, success=True)
        assert tier.lookup(page) is LookupStatus.HIT

    def test_a_second_writer_learns_pending_and_then_hit(self, tier: Tier) -> None:
        header, payload = sample_page(1)
        room = tier.prepare_store(header)
        assert isinstance(room, memoryview)
        assert tier.prepare_store(header) is LookupStatus.PENDING
        room[:] = payload
        tier.complete_store(id_of(header), success=True)
        assert tier.prepare_store(header) is LookupStatus.HIT

    def test_a_store_that_is_given_up_leaves_nothing(self, tier: Tier) -> None:
        header, payload = sample_page(1)
        before = tier.used_bytes
        tier.prepare_store(header)
        assert tier.used_bytes > before
        assert not tier.complete_store(id_of(header), success=False)
        assert tier.lookup(id_of(header)) is LookupStatus.MISS
        assert tier.used_bytes == before
        assert tier.bad_pages.at_store == 0
        assert put(tier, header, payload)

    def test_a_payload_that_does_not_match_its_checksum_is_refused(self, tier: Tier) -> None:
        header, payload = sample_page(1)
        wrong = bytes([payload[0] ^ 1]) + payload[1:]
        assert not put(tier, header, wrong)
        assert tier.lookup(id_of(header)) is LookupStatus.MISS
        assert tier.bad_pages.at_store == 1

    def test_a_damaged_page_is_a_counted_miss_and_is_removed(self, tier: Tier) -> None:
        header, payload = sample_page(1)
        page = id_of(header)
        before = tier.used_bytes
        put(tier, header, payload)
        self.damage(tier, page)
        assert tier.prepare_load(page) is LookupStatus.MISS
        assert tier.lookup(page) is LookupStatus.MISS
        assert tier.bad_pages.at_load == 1
        assert tier.used_bytes == before
        assert put(tier, header, payload)

    def test_a_page_that_goes_bad_while_lent_is_kept_from_others(self, tier: Tier) -> None:
        header, payload = sample_page(1)
        page = id_of(header)
        before = tier.used_bytes
        put(tier, header, payload)
        assert isinstance(tier.prepare_load(page), StoredPage)
        self.damage(tier, page)
        assert tier.prepare_load(page) is LookupStatus.MISS
        assert tier.prepare_load(page) is LookupStatus.MISS
        assert tier.bad_pages.at_load == 1
        tier.complete_load(page)
        assert tier.used_bytes == before

    def test_a_pinned_page_does_not_leave(self, tier: Tier) -> None:
        header, payload = sample_page(1)
        page = id_of(header)
        put(tier, header, payload)
        lent = tier.prepare_load(page)
        tier.prepare_load(page)
        assert isinstance(lent, StoredPage)
        assert not tier.remove(page)
        tier.complete_load(page)
        assert not tier.remove(page)
        assert lent.payload == payload
        tier.complete_load(page)
        assert tier.remove(page)
        assert tier.lookup(page) is LookupStatus.MISS

    def test_a_page_that_is_being_written_does_not_leave(self, tier: Tier) -> None:
        header, payload = sample_page(1)
        room = tier.prepare_store(header)
        assert not tier.remove(id_of(header))
        assert isinstance(room, memoryview)
        room[:] = payload
        assert tier.complete_store(id_of(header), success=True)

    def test_a_full_tier_takes_no_more_and_evicts_nothing(self, tier: Tier) -> None:
        held = []
        for number in range(100):
            header, payload = sample_page(number)
            if put(tier, header, payload):
                held.append(id_of(header))
            assert tier.used_bytes <= tier.budget_bytes
        assert len(held) >= BUDGET_BYTES // PAGE_BYTES // 2
        assert tier.prepare_store(sample_page(1000)[0]) is LookupStatus.RETRY
        assert all(tier.lookup(page) is LookupStatus.HIT for page in held)
        tier.remove(held[0])
        assert put(tier, *sample_page(1000))

    def test_a_page_larger_than_the_tier_finds_no_room(self, tier: Tier) -> None:
        header, _ = sample_page(1, BUDGET_BYTES + 1)
        assert tier.prepare_store(header) is LookupStatus.RETRY

    def test_parts_of_one_page_are_kept_apart(self, tier: Tier) -> None:
        full, state = sample_page(1), sample_page(1, 999, part=Part.STATE)
        assert put(tier, *full)
        assert tier.lookup(id_of(state[0])) is LookupStatus.MISS
        assert put(tier, *state)
        assert read(tier, id_of(full[0])) == full[1]
        assert read(tier, id_of(state[0])) == state[1]

    def test_a_page_that_was_not_there_is_gone(self, tier: Tier) -> None:
        assert tier.remove(id_of(sample_page(1)[0]))

    def test_readable_pages_are_listed(self, tier: Tier) -> None:
        headers = {sample_page(number)[0] for number in range(3)}
        for number in range(3):
            put(tier, *sample_page(number))
        tier.prepare_store(sample_page(3)[0])
        assert set(tier.pages()) == headers
        tier.complete_store(id_of(sample_page(3)[0]), success=False)

    def test_completing_what_nobody_prepared_is_an_error(self, tier: Tier) -> None:
        page = id_of(sample_page(1)[0])
        with pytest.raises(NotPreparedError):
            tier.complete_store(page, success=True)
        with pytest.raises(NotPreparedError):
            tier.complete_load(page)

    def test_a_closed_tier_answers_miss(self, tier: Tier) -> None:
        put(tier, *sample_page(1))
        page = id_of(sample_page(1)[0])
        tier.close()
        assert tier.lookup(page) is LookupStatus.MISS
        assert tier.prepare_load(page) is LookupStatus.MISS
        assert tier.prepare_store(sample_page(2)[0]) is LookupStatus.MISS
        assert list(tier.pages()) == []

    def test_a_loan_outlives_the_tier(self, tier: Tier) -> None:
        header, payload = sample_page(1)
        put(tier, header, payload)
        lent = tier.prepare_load(id_of(header))
        assert isinstance(lent, StoredPage)
        tier.close()
        assert lent.payload == payload
        tier.complete_load(id_of(header))

    def test_a_store_that_a_close_overtakes_is_not_readable(self, tier: Tier) -> None:
        header, payload = sample_page(1)
        room = tier.prepare_store(header)
        assert isinstance(room, memoryview)
        tier.close()
        room[:] = payload
        assert not tier.complete_store(id_of(header), success=True)

    def test_many_threads_never_see_a_wrong_payload_or_break_the_cap(self, tier: Tier) -> None:
        pages = [sample_page(number, 1000 * (1 + number % 50)) for number in range(60)]
        problems: list[str] = []
        stop = threading.Event()

        def watch() -> None:
            while not stop.is_set():
                if tier.used_bytes > tier.budget_bytes:
                    problems.append("over the cap")

        def work(seed: int) -> None:
            chance = random.Random(seed)
            try:
                for _ in range(300):
                    header, payload = chance.choice(pages)
                    page = id_of(header)
                    action = chance.random()
                    if action < 0.4:
                        put(tier, header, payload)
                    elif action < 0.8:
                        got = read(tier, page)
                        if isinstance(got, bytes) and got != payload:
                            problems.append("a wrong payload")
                    else:
                        tier.remove(page)
            except Exception as error:  # noqa: BLE001
                problems.append(repr(error))

        watcher = threading.Thread(target=watch)
        watcher.start()
        workers = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        stop.set()
        watcher.join()
        assert problems == []
        assert tier.bad_pages == (0, 0)


_NUMBERS = st.integers(0, 7)
_SIZES = st.sampled_from([1, 63, 64, 4096, 5000, 40_000, 70_001])
_MACHINE_BUDGET_BYTES = 256 << 10


class TierMachine(RuleBasedStateMachine):
    """Any order of verbs against a plain dict. Made by `tier_machine`."""

    make_tier: Callable[[int], Tier]

    def __init__(self) -> None:
        super().__init__()
        self.tier = type(self).make_tier(_MACHINE_BUDGET_BYTES)
        self.held: dict[PageId, bytes] = {}
        self.writing: dict[PageId, tuple[memoryview, bytes]] = {}
        self.loans: list[tuple[PageId, StoredPage]] = []

    @rule(number=_NUMBERS, size=_SIZES)
    def prepare_store(self, number: int, size: int) -> None:
        """A writer asks for room."""
        header, payload = sample_page(number, size)
        page = id_of(header)
        room = self.tier.prepare_store(header)
        if page in self.held:
            assert room is LookupStatus.HIT
        elif page in self.writing:
            assert room is LookupStatus.PENDING
        elif isinstance(room, memoryview):
            assert room.nbytes == size
            self.writing[page] = room, payload
        else:
            assert room is LookupStatus.RETRY
            assert self.held or self.writing, "an empty tier has room"

    @precondition(lambda self: bool(self.writing))
    @rule(data=st.data(), fate=st.sampled_from(["good", "good", "bad", "given up"]))
    def complete_store(self, data: st.DataObject, fate: str) -> None:
        """A writer ends, with the right payload, a wrong one or none."""
        page = data.draw(st.sampled_from(sorted(self.writing)))
        room, payload = self.writing.pop(page)
        room[:] = payload
        if fate == "bad":
            room[0] ^= 1
        good = self.tier.complete_store(page, success=fate != "given up")
        assert good == (fate == "good")
        if good:
            self.held[page] = payload

    @rule(number=_NUMBERS)
    def prepare_load(self, number: int) -> None:
        """A reader asks for a page."""
        page = PageId(sample_key(number), Part.FULL)
        stored = self.tier.prepare_load(page)
        if page in self.held:
            assert isinstance(stored, StoredPage)
            self.loans.append((page, stored))
        else:
            assert stored is self._expected(page)

    @precondition(lambda self: bool(self.loans))
    @rule(data=st.data())
    def complete_load(self, data: st.DataObject) -> None:
        """A reader ends."""
        at = data.draw(st.integers(0, len(self.loans) - 1))
        page, stored = self.loans.pop(at)
        assert stored.payload == self.held[page]
        self.tier.complete_load(page)

    @rule(number=_NUMBERS)
    def remove(self, number: int) -> None:
        """Somebody wants a page to leave."""
        page = PageId(sample_key(number), Part.FULL)
        is_free = page not in self.writing and not Counter(p for p, _ in self.loans)[page]
        assert self.tier.remove(page) == is_free
        if is_free:
            self.held.pop(page, None)

    @invariant()
    def look_ups_say_what_the_dict_says(self) -> None:
        """Every page is known as what it is."""
        for number in range(8):
            page = PageId(sample_key(number), Part.FULL)
            assert self.tier.lookup(page) is self._expected(page)

    @invariant()
    def lent_payloads_stay_as_they_are(self) -> None:
        """A pinned page is where it was."""
        for page, stored in self.loans:
            assert stored.payload == self.held[page]

    @invariant()
    def the_cap_holds(self) -> None:
        """Nothing exceeds the budget, and the tables agree."""
        assert self.tier.used_bytes <= self.tier.budget_bytes
        self.tier.check()

    def teardown(self) -> None:
        """Close the tier."""
        self.tier.close()

    def _expected(self, page: PageId) -> LookupStatus:
        if page in self.held:
            return LookupStatus.HIT
        return LookupStatus.PENDING if page in self.writing else LookupStatus.MISS


def tier_machine(make_tier: Callable[[int], Tier]) -> type[TierMachine]:
    """Return a state machine for the tiers that `make_tier(budget_bytes)` returns."""
    return type("Machine", (TierMachine,), {"make_tier": staticmethod(make_tier)})
