"""Whatever comes in is a message whose frames fit, or a `BadMessage`."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from pie.page.events import Epoch, PlaceId
from pie.page.key import PageKey
from pie.wire import BadMessage, WireSettings
from pie.wire.codec import decode, encode
from pie.wire.messages import (
    AskStatus,
    Cancel,
    Credit,
    Generate,
    Load,
    Lookup,
    Message,
    PageData,
    Ping,
    PutPages,
    StatusReport,
    StepTokens,
    TokenDelta,
)

from .helpers import header_of

LIMITS = WireSettings()
HEADER = header_of(b"abcd")
FRAME = memoryview(b"abcd")
LOAD = Load(1, 2, 3, 4, 5, 6.0, 7.0)

MESSAGES: list[tuple[Message, list[memoryview]]] = [
    (Ping("id"), []),
    (Credit(3), []),
    (Cancel("id"), []),
    (AskStatus("id"), []),
    (StatusReport("id", PlaceId("w0"), Epoch(1), "serving", {"steps": 3}, {"rate": 0.5}), []),
    (Generate("id", Epoch(1), 1, 4, stop=("a",)), [FRAME]),
    (StepTokens(Epoch(1), (TokenDelta("id", (1, 2), "ab"),), LOAD), []),
    (Lookup("id", Epoch(1), ((PageKey(b"k" * 32), 0),)), []),
    (PageData("id", 0, 0), []),
    (PageData("id", 0, 1, HEADER), [FRAME]),
    (PutPages("id", Epoch(1), (HEADER, HEADER)), [FRAME, FRAME]),
]
one_of_ours = st.sampled_from(MESSAGES)


@pytest.mark.parametrize(("message", "frames"), MESSAGES, ids=lambda m: type(m).__name__)
def test_a_message_is_read_as_it_was_written(message: Message, frames: list[memoryview]) -> None:
    assert decode(encode(message), frames, LIMITS) == message


@pytest.mark.parametrize(("message", "frames"), MESSAGES, ids=lambda m: type(m).__name__)
def test_wrong_frames_are_refused_with_the_request_id(
    message: Message, frames: list[memoryview]
) -> None:
    with pytest.raises(BadMessage, match="frames instead of") as caught:
        decode(encode(message), [*frames, FRAME], LIMITS)
    assert caught.value.request_id == getattr(message, "request_id", "")


def test_half_a_token_is_refused() -> None:
    header = encode(Generate("id", Epoch(1), 1, 4))
    with pytest.raises(BadMessage, match="whole number"):
        decode(header, [memoryview(b"abcde")], LIMITS)


@settings(max_examples=500)
@given(st.binary(max_size=200))
def test_garbage_is_a_bad_message(garbage: bytes) -> None:
    with pytest.raises(BadMessage):
        decode(garbage, [], LIMITS)


@given(one_of_ours, st.data())
def test_damage_is_a_bad_message_or_another_message(
    ours: tuple[Message, list[memoryview]], data: st.DataObject
) -> None:
    header = bytearray(encode(ours[0]))
    at = data.draw(st.integers(0, len(header) - 1))
    header[at] ^= data.draw(st.integers(1, 255))
    try:
        decode(bytes(header), ours[1], LIMITS)
    except BadMessage:
        return


@given(one_of_ours, st.data())
def test_a_header_that_breaks_off_is_a_bad_message(
    ours: tuple[Message, list[memoryview]], data: st.DataObject
) -> None:
    header = encode(ours[0])
    with pytest.raises(BadMessage):
        decode(header[: data.draw(st.integers(0, len(header) - 1))], ours[1], LIMITS)


@pytest.mark.parametrize(
    "header",
    [
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\x91" * 100_000,
        b"\x81\xa4type" + b"\x91" * 100_000,
        b"\x82\xa4type\xa4ping\xaarequest_id\xa2\xff\xfe",
    ],
    ids=["list", "map", "text", "deep", "deep field", "bad utf-8"],
)
def test_headers_made_to_hurt_are_bad_messages(header: bytes) -> None:
    with pytest.raises(BadMessage):
        decode(header, [], LIMITS)


@pytest.mark.parametrize("fields", [{"type": "boil"}, {"type": "lookup"}, {}])
def test_the_request_id_of_an_unknown_message_is_found(fields: dict[str, str]) -> None:
    with pytest.raises(BadMessage) as caught:
        decode(msgspec.msgpack.encode(fields | {"request_id": "id"}), [], LIMITS)
    assert caught.value.request_id == "id"


def test_too_much_is_refused() -> None:
    small = WireSettings(max_header_bytes=1024, max_frames=1)
    with pytest.raises(BadMessage, match="too large"):
        decode(encode(Ping("x" * 2000)), [], small)
    with pytest.raises(BadMessage, match="too many"):
        decode(encode(PutPages("id", Epoch(1), (HEADER, HEADER))), [FRAME, FRAME], small)


def test_step_tokens_are_small() -> None:
    deltas = tuple(TokenDelta(f"{i:016x}", (i,), "word") for i in range(16))
    assert len(encode(StepTokens(Epoch(1), deltas, LOAD))) < 16 * 32 + 100
