"""Tables of nodes that share a bucket, against a plain model of the bucket: no page is lost unless one removes it."""

from __future__ import annotations

import contextlib
import functools
from typing import NamedTuple

from hypothesis import settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pie.page.format import page_name
from pie.page.header import PageHeader
from pie.page.lookup import LookupStatus
from pie.pool.conformance import sample_page
from pie.pool.object_catalogue import FoundPage, Look
from pie.pool.object_entry import ObjectEntry, ObjectHome, ObjectPack
from pie.pool.object_names import earlier_pack_name, pack_name
from pie.pool.object_packs import Packs
from pie.pool.object_removals import Removals
from pie.pool.object_table import ObjectTable, Placed
from pie.pool.pack_index import Left
from pie.pool.space import Space
from pie.pool.tier import id_of

BYTES = 100
LIST_BYTES = 30
BUDGET_BYTES = 1 << 20
SPARE_S = 3.0
PAGES = 10
NODES = st.integers(0, 2)


@functools.cache
def header_of(number: int) -> PageHeader:
    return sample_page(number, BYTES)[0]


class Slot(NamedTuple):
    """A page in an object of the model."""

    number: int
    start: int


class Upload(NamedTuple):
    """Objects that are in the bucket, and whose writer does not know it yet."""

    pack: ObjectPack
    placed: list[Placed]
    old: ObjectPack | None
    ends: contextlib.ExitStack


class Node:
    """A table, and what is under way around it."""

    def __init__(self, now: list[float]) -> None:
        self.space = Space(BUDGET_BYTES)
        self.removals = Removals(self.space)
        self.waiting: list[Left] = []
        """What this node has still to tell of pages that have left packs."""
        self.read = 0
        """How much of what nodes have told it has read."""
        packs = Packs(self.space, self.removals, SPARE_S, lambda: now[0])
        self.table = ObjectTable(
            self.space,
            self.removals,
            packs,
            lambda header, length: None,
            self.waiting.append,
            lambda: None,
        )
        self.upload: Upload | None = None
        self.look: Look | None = None


class TableMachine(RuleBasedStateMachine):
    """Three nodes and one bucket. What takes time is two steps, with any others in between."""

    def __init__(self) -> None:
        super().__init__()
        self.now = [0.0]
        self.nodes = [Node(self.now) for _ in range(3)]
        self.bucket: dict[str, list[Slot]] = {}
        self.left: list[Left] = []
        """What lists in the bucket say."""
        self.wanted: set[int] = set()
        """Pages that were stored and that no node has ever removed.

        One that a node removed and another stores again may be a miss: there can be a copy of it in a
        pack that is dead to the one and counts for the other.
        """
        self.removed: set[int] = set()
        self.count = 0

    @rule(at=NODES, numbers=st.sets(st.integers(0, PAGES - 1), min_size=1), time=st.integers(1, 99))
    def send_a_pack(self, at: int, numbers: set[int], time: int) -> None:
        node = self.nodes[at]
        entries = []
        for number in sorted(numbers):
            header = header_of(number)
            if node.upload is None and id_of(header) not in node.table.entries:
                claim = node.space.claim(2 * BYTES)
                entry = ObjectEntry(header, LookupStatus.HIT, room=memoryview(b""), claim=claim)
                node.table.entries[id_of(header)] = entry
                entries.append(entry)
                self.wanted |= {number} - self.removed
        if entries:
            name = pack_name(time, self._chance(), LIST_BYTES)
            node.upload = self._sent(node, name, entries, None)

    @rule(at=NODES, number=st.integers(0, PAGES - 1))
    def send_a_page_file(self, at: int, number: int) -> None:
        """Of a page that lies in packs of others: what is small to one is large to nobody else, but who knows."""
        node, header = self.nodes[at], header_of(number)
        if id_of(header) in node.table.entries:
            return
        entry = ObjectEntry(header, LookupStatus.HIT, room=memoryview(b""))
        name = page_name(header.model_root, header.key, header.part)
        if node.removals.is_about(name):
            return
        entry.claim = node.space.claim(2 * BYTES)
        node.table.entries[id_of(header)] = entry
        self.bucket[name] = [Slot(number, 0)]
        self.wanted |= {number} - self.removed
        node.table.wrote_page(entry, header, BYTES)

    @rule(at=NODES)
    def learn_that_it_is_sent(self, at: int) -> None:
        node = self.nodes[at]
        upload, node.upload = node.upload, None
        if upload is None:
            return
        if upload.old is None:
            node.table.wrote_pack(upload.pack, upload.placed)
        else:
            node.table.moved(upload.old, upload.pack, upload.placed)
            upload.old.is_moving = False
        upload.ends.close()

    @rule(at=NODES)
    def begin_to_look(self, at: int) -> None:
        node = self.nodes[at]
        if node.look is not None:
            return
        node.table.begin_look()
        look = node.look = Look()
        look.left = self.left[node.read :]
        node.read = len(self.left)
        left = {(one.pack, one.offset) for one in (*self.left, *node.waiting)}
        for name, slots in sorted(self.bucket.items()):
            if not name.startswith("packs/"):
                page = id_of(header_of(slots[0].number))
                look.page_files.add(page)
                if not node.table.knows_page(page, name):
                    look.pages.append(FoundPage(header_of(slots[0].number), ObjectHome(BYTES), 0))
                continue
            look.packs.add(name)
            if not node.table.knows_pack(name):
                pack = ObjectPack(name, len(slots) * BYTES + LIST_BYTES)
                staying = [slot for slot in slots if (name, slot.start) not in left]
                if not staying:
                    look.dead_packs.append(pack)
                for number, start in staying:
                    look.pages.append(
                        FoundPage(header_of(number), ObjectHome(BYTES, start, pack), 0)
                    )

    @rule(at=NODES)
    def end_the_look(self, at: int) -> None:
        node = self.nodes[at]
        look, node.look = node.look, None
        if look is not None:
            node.table.end_look(look, BUDGET_BYTES)

    @rule(at=NODES, number=st.integers(0, PAGES - 1))
    def remove(self, at: int, number: int) -> None:
        table = self.nodes[at].table
        page = id_of(header_of(number))
        entry = table.entries.get(page)
        if entry is not None and entry.status is LookupStatus.HIT:
            table.leave(page, entry)
            self.wanted.discard(number)
            self.removed.add(number)

    @rule(at=NODES)
    def tell_what_has_left(self, at: int) -> None:
        node = self.nodes[at]
        self.left.extend(node.waiting)
        node.waiting.clear()

    @rule(at=NODES)
    def let_objects_go(self, at: int) -> None:
        with self.nodes[at].removals.due(100) as some:
            for name in some:
                self.bucket.pop(name, None)

    @rule(at=NODES)
    def make_room(self, at: int) -> None:
        self.nodes[at].table.make_room(BYTES)

    @precondition(lambda self: any(node.upload is None for node in self.nodes))
    @rule(at=NODES)
    def send_a_pack_anew(self, at: int) -> None:
        node = self.nodes[at]
        if node.upload is not None:
            return
        for pack in node.table.take_half_dead():
            slots = self.bucket.get(pack.name, [])
            pages = [(id_of(header_of(number)), start) for number, start in slots]
            alive = node.table.alive_in(pack, pages)
            if not alive or pack.is_leaving or node.upload is not None:
                continue
            name = earlier_pack_name(pack.name, self._chance(), LIST_BYTES)
            assert name < pack.name
            node.upload = self._sent(node, name, [entry for entry, _ in alive], pack)
            node.space.found(node.upload.pack.size)

    @rule()
    def wait(self) -> None:
        self.now[0] += SPARE_S

    @invariant()
    def tables_agree(self) -> None:
        for node in self.nodes:
            node.table.check()
            node.removals.check()

    @invariant()
    def no_page_is_lost(self) -> None:
        left = {(one.pack, one.offset) for one in self.left}
        here = {
            slot.number
            for name, slots in self.bucket.items()
            for slot in slots
            if (name, slot.start) not in left
        }
        assert here >= self.wanted

    def teardown(self) -> None:
        for at in range(3):
            self.learn_that_it_is_sent(at)
            self.end_the_look(at)
            self.tell_what_has_left(at)
        for _ in range(4):
            for at in range(3):
                self.begin_to_look(at)
                self.end_the_look(at)
                self.let_objects_go(at)
                self.wait()
        for node in self.nodes:
            known = {page for page, entry in node.table.entries.items() if self._is_there(entry)}
            assert known >= {id_of(header_of(number)) for number in self.wanted}
        for one in self.bucket:
            assert all(one in self._taken(node) for node in self.nodes), (
                "all know what is there, and count it"
            )

    def _taken(self, node: Node) -> set[str]:
        names = {entry.name_in(entry.home) for entry in node.table.entries.values() if entry.home}
        return names | {name for name in self.bucket if node.table.knows_pack(name)}

    def _is_there(self, entry: ObjectEntry) -> bool:
        home = entry.home
        if home is None:
            return False
        slots = self.bucket.get(entry.name_in(home), [])
        return any(
            id_of(header_of(number)) == id_of(entry.header) and start == home.start
            for number, start in slots
        )

    def _sent(
        self, node: Node, name: str, entries: list[ObjectEntry], old: ObjectPack | None
    ) -> Upload:
        ends = contextlib.ExitStack()
        ends.enter_context(node.removals.alone(name))
        pack = ObjectPack(name, len(entries) * BYTES + LIST_BYTES)
        placed = [
            Placed(entry, ObjectHome(BYTES, at * BYTES, pack)) for at, entry in enumerate(entries)
        ]
        numbers = {id_of(header_of(number)): number for number in range(PAGES)}
        self.bucket[name] = [
            Slot(numbers[id_of(entry.header)], home.start) for entry, home in placed
        ]
        return Upload(pack, placed, old, ends)

    def _chance(self) -> bytes:
        self.count += 1
        return self.count.to_bytes(8, "big")


def test_no_page_is_lost_whatever_nodes_that_share_a_bucket_do_at_once() -> None:
    run_state_machine_as_test(
        TableMachine, settings=settings(max_examples=25, stateful_step_count=30)
    )


def test_nodes_agree_on_the_pack_whose_name_sorts_first() -> None:
    machine = TableMachine()
    for at, time in ((0, 2), (1, 1)):
        machine.send_a_pack(at, {1, 2}, time)
        machine.learn_that_it_is_sent(at)
    first = min(machine.bucket)
    for _ in range(2):
        for at in (0, 1):
            machine.begin_to_look(at)
            machine.end_the_look(at)
            machine.let_objects_go(at)
    assert len(machine.bucket) == 2, "a node may read from it that has not seen the other one"
    machine.wait()
    machine.teardown()
    assert list(machine.bucket) == [first]
