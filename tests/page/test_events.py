"""Events survive being written and read."""

from __future__ import annotations

import msgspec
from hypothesis import given, strategies as st

from pie.page.events import (
    Epoch,
    PageEntry,
    PageEvent,
    PageRemoved,
    PageStored,
    Part,
    PlaceCleared,
    PlaceId,
    Tier,
)
from pie.page.key import PageKey

numbers = st.integers(0, 2**63 - 1)
entries = st.builds(
    PageEntry,
    key=st.binary(min_size=32, max_size=32).map(PageKey),
    parent=st.binary(min_size=32, max_size=32),
    index=numbers,
    part=st.sampled_from(Part),
    tier=st.sampled_from(Tier),
    bytes=numbers,
    tenant_tag=st.text(),
)
places = {"place": st.text().map(PlaceId), "epoch": numbers.map(Epoch), "seq": numbers}
lists = st.lists(entries, max_size=4).map(tuple)
events = st.one_of(
    st.builds(PageStored, **places, entries=lists),
    st.builds(PageRemoved, **places, entries=lists),
    st.builds(PlaceCleared, **places),
)


@given(events)
def test_an_event_is_read_as_it_was_written(event: PageEvent) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(event), type=PageEvent) == event
    assert msgspec.json.decode(msgspec.json.encode(event), type=PageEvent) == event


def test_an_entry_takes_little_room() -> None:
    entry = PageEntry(PageKey(b"k" * 32), b"p" * 32, 7, Part.FULL, Tier.HOST, 1 << 20)
    assert len(msgspec.msgpack.encode(entry)) <= 80
