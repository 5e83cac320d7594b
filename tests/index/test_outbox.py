"""What a place has still to say is kept in order, in pieces of bounded size, up to a limit."""

from pie.index.conformance import entry
from pie.index.outbox import Outbox
from pie.page.events import Epoch, PageEvent, PageRemoved, PageStored, PlaceCleared, PlaceId

W0, FIRST = PlaceId("w0"), Epoch(1)


def listening(limit_entries: int = 10_000) -> Outbox:
    outbox = Outbox(limit_entries)
    outbox.announcing()
    return outbox


def must_announce(outbox: Outbox) -> bool:
    return outbox.must_announce  # a type checker would take a property for constant


def taken(outbox: Outbox) -> list[PageEvent]:
    events: list[PageEvent] = []
    while some := outbox.take(W0, FIRST, len(events) + 1)[0]:
        events += some
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    return events


def test_changes_come_out_in_order_with_neighbours_together() -> None:
    outbox = listening()
    outbox.stored([entry(1)])
    outbox.stored([entry(2)])
    outbox.removed([entry(1)])
    outbox.cleared()
    outbox.stored([entry(3)])
    assert taken(outbox) == [
        PageStored(W0, FIRST, 1, (entry(1), entry(2))),
        PageRemoved(W0, FIRST, 2, (entry(1),)),
        PlaceCleared(W0, FIRST, 3),
        PageStored(W0, FIRST, 4, (entry(3),)),
    ]


def test_nothing_is_no_change() -> None:
    outbox = listening()
    outbox.stored([])
    outbox.removed([])
    assert outbox.added == 0
    assert taken(outbox) == []


def test_large_changes_are_cut_and_small_ones_gathered_up_to_a_size() -> None:
    outbox = listening()
    outbox.stored([entry(number) for number in range(1_000)])
    for number in range(1_000, 2_000):
        outbox.stored([entry(number)])
    events = [event for event in taken(outbox) if isinstance(event, PageStored)]
    assert max(len(event.entries) for event in events) == 256
    assert len(events) <= 10
    assert [one for event in events for one in event.entries] == [
        entry(number) for number in range(2_000)
    ]


def test_a_change_is_out_with_its_last_piece() -> None:
    outbox = listening()
    outbox.stored([entry(1)])
    outbox.removed([entry(number) for number in range(3_000)])
    outs: list[int] = []
    while (some := outbox.take(W0, FIRST, 1))[0]:
        outs.append(some[1])
    assert outs == [1] * (len(outs) - 1) + [2]
    assert len(outs) > 1


def test_a_list_may_change_after_it_was_given() -> None:
    outbox = listening()
    entries = [entry(1)]
    outbox.stored(entries)
    entries.clear()
    assert taken(outbox) == [PageStored(W0, FIRST, 1, (entry(1),))]


def test_changes_before_the_first_announcement_are_part_of_it() -> None:
    outbox = Outbox(10)
    assert must_announce(outbox)
    outbox.stored([entry(1)])
    assert outbox.announcing() == 1
    assert not must_announce(outbox)
    assert taken(outbox) == []


def test_too_much_is_dropped_and_must_be_announced() -> None:
    outbox = listening(limit_entries=3)
    outbox.stored([entry(1), entry(2), entry(3)])
    assert not must_announce(outbox)
    outbox.cleared()
    assert must_announce(outbox)
    assert taken(outbox) == []
    outbox.stored([entry(5)])
    assert outbox.announcing() == 3
    outbox.stored([entry(6)])
    assert taken(outbox) == [PageStored(W0, FIRST, 1, (entry(6),))]


def test_what_is_taken_makes_room() -> None:
    outbox = listening(limit_entries=2)
    for number in range(10):
        outbox.stored([entry(number), entry(number)])
        events, out = outbox.take(W0, FIRST, 1)
        assert len(events) == 1
        assert out == outbox.added == number + 1
    assert not outbox.must_announce


def test_a_closed_one_keeps_nothing() -> None:
    outbox = listening()
    outbox.stored([entry(1)])
    outbox.close()
    outbox.announcing()
    outbox.stored([entry(2)])
    assert taken(outbox) == []
