"""Where conversations are, as a router remembers it."""

from __future__ import annotations

from hypothesis import given, strategies as st

from pie.page.events import PlaceId
from pie.page.key import PageKey, RootKey
from pie.policies.order_limits import MOST_SEQUENCE_PAGES
from pie.router import conversations
from pie.router.conversations import Conversations

A, B = PlaceId("a"), PlaceId("b")
ROOT = RootKey(b"root")


def chain(*path: int) -> list[PageKey]:
    """Return keys that name all before them, as pages' keys do."""
    return [PageKey(bytes(path[: at + 1])) for at in range(len(path))]


def began(known: Conversations, name: str, keys: list[PageKey], place: PlaceId = A) -> None:
    known.began((None, name), place, ROOT, keys, 1.0)
    known.named((None, name), f"tag-{name}", "tenant")


def test_a_conversation_is_where_its_latest_request_went() -> None:
    known = Conversations()
    began(known, "s", chain(1, 2))
    known.ended((None, "s"), chain(1, 2, 3), 2.0)
    began(known, "s", chain(1, 2), B)
    (one,) = known.latest(9)
    assert (one.place, one.came_from, one.running) == (B, A, 1)
    assert known.place_of((None, "s")) == B
    assert known.place_of(("salt", "s")) is None
    assert known.move("tag-s", A, 3.0)
    assert (known.place_of((None, "s")), one.moved_at_s) == (A, 3.0)
    assert not known.move("tag-t", A, 3.0)


def test_an_answers_pages_are_the_conversations_too() -> None:
    known = Conversations()
    began(known, "s", chain(1, 2))
    known.ended((None, "s"), chain(1, 2, 3), 2.0)
    (one,) = known.latest(9)
    assert list(one.keys) == chain(1, 2, 3)
    assert (one.running, one.used_s) == (0, 2.0)
    known.ended((None, "t"), chain(9), 2.0)
    assert len(known) == 1


def test_pages_are_shared_up_to_where_conversations_part() -> None:
    known = Conversations()
    began(known, "s", chain(1, 2, 3, 4))
    began(known, "t", chain(1, 2, 5))
    began(known, "u", chain(7))
    assert [known.shared_pages(one) for one in known.latest(9)] == [0, 2, 2]
    assert [one.tag for one in known.latest(1)] == ["tag-u"]


@given(
    paths=st.lists(
        st.tuples(st.sampled_from("stuv"), st.lists(st.integers(0, 2), max_size=6)), max_size=40
    ),
    most=st.integers(1, 12),
)
def test_what_is_remembered_is_bounded_and_counted_right(
    paths: list[tuple[str, list[int]]], most: int
) -> None:
    before = conversations._MOST_PAGES
    conversations._MOST_PAGES = most
    try:
        known, told = Conversations(), dict[str, list[PageKey]]()
        for name, path in paths:
            began(known, name, chain(*path))
            told[f"tag-{name}"] = chain(*path)
            seen = list(known.latest(99))
            assert len({key for one in seen for key in one.keys}) <= most
            for one in seen:
                assert list(one.keys) == told[one.tag]
                others = {key for other in seen if other is not one for key in other.keys}
                assert known.shared_pages(one) == sum(key in others for key in one.keys)
    finally:
        conversations._MOST_PAGES = before


def test_of_a_long_conversation_all_pages_are_known_up_to_a_limit() -> None:
    known, keys = Conversations(), [PageKey(at.to_bytes(4, "big")) for at in range(20_000)]
    began(known, "long", keys[:15_000])
    (one,) = known.latest(9)
    assert len(one.keys) == 15_000
    known.ended((None, "long"), keys, 2.0)
    assert len(one.keys) == MOST_SEQUENCE_PAGES == 16_384


def test_the_conversation_used_longest_ago_is_forgotten_first() -> None:
    before = conversations._MOST
    conversations._MOST = 2
    try:
        known = Conversations()
        for name in "stus":
            began(known, name, chain(ord(name)))
        assert [one.tag for one in known.latest(9)] == ["tag-s", "tag-u"]
        assert not known.move("tag-t", B, 1.0)
    finally:
        conversations._MOST = before
