"""Messages to bytes and back.

Covers the header's encoding, the limits on sizes, and which message has how many frames. Whatever
comes in is either a `Message` with frames that fit it, or a `BadMessage`. Does not cover what the
fields mean.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pie.wire.errors import BadMessage
from pie.wire.frames import Buffer
from pie.wire.messages import Generate, Message, PageData, PutPages
from pie.wire.program_runs import StartProgram
from pie.wire.settings import WireSettings

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Message)


class _AnyRequest(msgspec.Struct):
    """What can be known of a message that is not one of ours."""

    request_id: str = ""


_ID_DECODER = msgspec.msgpack.Decoder(_AnyRequest)

# A decoder raises these and no others on bytes from strangers; a RecursionError is deep nesting.
_DECODE_ERRORS = (msgspec.MsgspecError, ValueError, RecursionError, OverflowError, MemoryError)

encode = _ENCODER.encode
"""Return a message's header."""


def decode(
    header: memoryview | bytes, frames: Sequence[memoryview], limits: WireSettings
) -> Message:
    """Return the message of a header.

    Raises:
        BadMessage: The header is no message or does not fit the frames, or it is too much.
    """
    if (problem := too_large(header, frames, limits)) is not None:
        raise BadMessage(problem, _request_id(header))
    try:
        message: Message = _DECODER.decode(header)
    except _DECODE_ERRORS as error:
        raise BadMessage(f"Not a message: {error}.", _request_id(header)) from None
    _check_frames(message, frames)
    return message


def too_large(
    header: memoryview | bytes, frames: Sequence[Buffer], limits: WireSettings
) -> str | None:
    """Say in what a message is larger than one who keeps to these limits takes; None where it is not."""
    if len(header) > limits.max_header_bytes:
        return f"A header of {len(header)} bytes is too large: at most {limits.max_header_bytes}."
    if len(frames) > limits.max_frames:
        return f"{len(frames)} frames are too many: at most {limits.max_frames}."
    for frame in frames:
        size = memoryview(frame).nbytes
        if size > limits.max_frame_bytes:
            return f"A frame of {size} bytes is too large: at most {limits.max_frame_bytes}."
    return None


def request_id_of(message: Message) -> str:
    """Return a message's request id; empty where its kind has none."""
    return getattr(message, "request_id", "")


def _request_id(header: memoryview | bytes) -> str:
    try:
        return _ID_DECODER.decode(header).request_id
    except _DECODE_ERRORS:
        return ""


def _check_frames(message: Message, frames: Sequence[memoryview]) -> None:
    if isinstance(message, Generate):
        expected = 1
        if len(frames) == 1 and len(frames[0]) % 4:
            raise BadMessage("Token ids are not a whole number of u32.", message.request_id)
    elif isinstance(message, StartProgram):
        expected = 1
    elif isinstance(message, PageData):
        expected = 0 if message.header is None or message.in_slot else 1
    elif isinstance(message, PutPages):
        expected = len(message.headers)
    else:
        expected = 0
    if len(frames) != expected:
        raise BadMessage(
            f"{type(message).__name__} came with {len(frames)} frames instead of {expected}.",
            request_id_of(message),
        )
