"""What an inferlet's process and its host say to each other.

Covers the messages, and how many frames each has. Does not cover the stream that they travel on
(`pie.wire.pipe`), what a host does with them (`pie.worker.programs.host`) or what a program's author
sees (`pie.inferlet`).

A program numbers its calls and its working sets itself, so that it need not wait for one call's
answer before it makes the next. Calls that name a working set in common are carried out in the order
in which they were made; others as there is room. Frames are little-endian.
"""

from __future__ import annotations

import enum

import msgspec

from pie.wire.messages import Grammar, Sampling


class Trouble(enum.StrEnum):
    """What can be wrong with a call."""

    BAD_CALL = "bad_call"
    NEVER_WRITTEN = "never_written"
    DROPPED = "dropped"
    FROZEN_PAGE = "frozen_page"
    NOTHING_ATTENDED = "nothing_attended"
    RECURRENT = "recurrent"
    CONTEXT_LENGTH = "context_length"
    OUT_OF_PAGES = "out_of_pages"
    NOT_ALLOWED = "not_allowed"
    FAILED = "failed"
    HTTP_FAILED = "http_failed"
    TOOL_FAILED = "tool_failed"


class Rows(enum.StrEnum):
    """Which of a pass's tokens something is wanted of."""

    NONE = "none"
    LAST = "last"
    ALL = "all"


# Program to host


class OpenSet(msgspec.Struct, frozen=True, tag="open"):
    """Make an empty working set. Not answered where it goes well."""

    call: int
    set: int


class CloseSet(msgspec.Struct, frozen=True, tag="close"):
    """Let go of a working set. Not answered where it goes well."""

    call: int
    set: int


class ForkSet(msgspec.Struct, frozen=True, tag="fork"):
    """Make working sets that go on from another. Answered by `SetState` of the source."""

    call: int
    set: int
    forks: tuple[int, ...]


class DropSlots(msgspec.Struct, frozen=True, tag="drop"):
    """Take slots out of every later pass. One frame: slots, u32. Answered by `SetState`."""

    call: int
    set: int


class CompactSet(msgspec.Struct, frozen=True, tag="compact"):
    """Gather live slots into as few pages as they need. Answered by `SetState`."""

    call: int
    set: int


class SealSet(msgspec.Struct, frozen=True, tag="seal"):
    """Freeze the writable buffer as it is. Answered by `SetState`."""

    call: int
    set: int


class ParkSet(msgspec.Struct, frozen=True, tag="park"):
    """Let the set's pages wait in host memory until it is used again. Answered by `SetState`."""

    call: int
    set: int


class PassInput(msgspec.Struct, frozen=True, omit_defaults=True):
    """One sequence's part of a pass.

    Frames, in this order, where they are announced: tokens u32, embeddings float32
    `[tokens, hidden_size]`, positions u32, slots read u32, mask bits (`numpy.packbits` of the mask in C
    order), targets u32.
    """

    set: int
    has_embeddings: bool = False
    """Whether embeddings are given; the tokens only say how many there are then."""
    has_positions: bool = False
    write: int | None = None
    """The first slot to write; None goes on after the last."""
    has_read: bool = False
    """Whether the slots that it may attend to are given; its own are always among them."""
    mask: tuple[int, int, int, int] | None = None
    """Shape of a mask: layers or 1, query heads or 1, tokens, slots up to the last one written."""
    logits: Rows = Rows.NONE
    hidden: Rows = Rows.NONE
    scores: int = 0
    """Attention of so many last tokens."""
    targets: int = 0
    """Log-probabilities of so many tokens, one after each of the last inputs."""
    top: int = 0
    """The likeliest so many tokens after the last input, with their log-probabilities."""
    sampling: Sampling | None = None
    """Draw the next token."""
    draw: int = 0
    """How many tokens were drawn before this one: the position of a seeded draw."""


class RunPass(msgspec.Struct, frozen=True, tag="run"):
    """Run sequences through the model. Answered by `PassDone`."""

    call: int
    inputs: tuple[PassInput, ...]


class GenerateTokens(msgspec.Struct, frozen=True, tag="generate_tokens"):
    """Run tokens and go on with what is drawn. One frame: tokens, u32.

    Answered by `Drawn` until one says why it ended. The last token drawn is not run.
    """

    call: int
    set: int
    max_tokens: int
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    grammar: Grammar | None = None
    """What the answer must match as a whole; the model's end tokens end it then in any case."""


class CancelCall(msgspec.Struct, frozen=True, tag="cancel_call"):
    """Stop a `GenerateTokens`; its last `Drawn` says `cancelled`."""

    call: int
    target: int


class Encode(msgspec.Struct, frozen=True, tag="encode"):
    """Turn text into tokens. Answered by `Encoded`."""

    call: int
    text: str
    special: bool = False
    """Whether to add what the model expects around a plain text."""


class ChatTurn(msgspec.Struct, frozen=True, array_like=True):
    """One message of a conversation."""

    role: str
    content: str


class Render(msgspec.Struct, frozen=True, tag="render"):
    """Turn a conversation into tokens by the model's chat template. Answered by `Encoded`."""

    call: int
    turns: tuple[ChatTurn, ...]
    opens_answer: bool = True
    """Whether the assistant's next turn is begun at its end."""
    known_turns: int = 0
    """Leading turns whose tokens are known already: only what follows them is wanted."""
    known_answer: str | None = None
    """What was generated after those, known too."""


class Decode(msgspec.Struct, frozen=True, tag="decode"):
    """Turn tokens into text. One frame: tokens, u32. Answered by `Decoded`."""

    call: int


class Say(msgspec.Struct, frozen=True, tag="say"):
    """A message for the client. Not answered."""

    text: str


class Listen(msgspec.Struct, frozen=True, tag="listen"):
    """Wait for the client's next message. Answered by `Heard`."""

    call: int


class HttpCall(msgspec.Struct, frozen=True, tag="http"):
    """Ask a server by HTTP. One frame: the body. Answered by `HttpAnswer`."""

    call: int
    method: str
    url: str
    headers: tuple[tuple[str, str], ...] = ()


class CallTool(msgspec.Struct, frozen=True, tag="call_tool"):
    """Call a tool of the host. One frame: its arguments, a JSON object. Answered by `ToolAnswer`."""

    call: int
    name: str


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """The program is over; the last thing that it says."""

    result: str = ""
    error: str = ""
    """Its traceback, where it raised."""
    warning: str = ""
    """What went wrong unheard, where it did not raise."""


FromProgram = (
    OpenSet
    | CloseSet
    | ForkSet
    | DropSlots
    | CompactSet
    | SealSet
    | ParkSet
    | RunPass
    | GenerateTokens
    | CancelCall
    | Encode
    | Render
    | Decode
    | Say
    | Listen
    | HttpCall
    | CallTool
    | Finished
)
"""Anything that a program says."""

SetCall = OpenSet | CloseSet | ForkSet | DropSlots | CompactSet | SealSet | ParkSet
EngineCall = SetCall | RunPass | GenerateTokens | CancelCall
"""What the engine answers; the rest is the host's."""


# Host to program


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """Run this. The first thing that a host says."""

    name: str
    source: str
    arguments: dict[str, str]
    """As text, by the parameters' names."""
    model: ModelFacts
    entry: str = "main"
    """The function to call."""
    tools: tuple[ToolFacts, ...] = ()


class ToolFacts(msgspec.Struct, frozen=True):
    """What a program may know of a tool."""

    name: str
    description: str
    schema: str
    """JSON Schema of its arguments, an object."""


class ModelFacts(msgspec.Struct, frozen=True):
    """What a program may know of the model."""

    name: str
    vocab_size: int
    context_tokens: int
    page_tokens: int
    layers: int
    """Those with attention."""
    query_heads: int
    kv_heads: int
    hidden_size: int
    eos_token_ids: tuple[int, ...]


class SetState(msgspec.Struct, frozen=True, tag="set_state"):
    """A working set, as it is after a call. One frame: its live slots, u32."""

    call: int
    length: int
    """Slots written so far, dropped ones included: the next one's number."""
    pages: int
    cached_tokens: int
    """Tokens that were not computed, because their pages were there."""


class PassPart(msgspec.Struct, frozen=True):
    """What one sequence of a pass gave; arrays are frames in the order of the shapes here."""

    first_slot: int
    length: int
    pages: int
    cached_tokens: int
    token: int | None = None
    logits: tuple[int, int] | None = None
    """float32 `[rows, vocab_size]`"""
    hidden: tuple[int, int] | None = None
    """float32 `[rows, hidden_size]`"""
    scores: tuple[int, int, int] | None = None
    """float32 `[layers, query_heads, slots]`"""
    targets: int = 0
    """float32 `[targets]`"""
    top: int = 0
    """u32 `[top]`, then float32 `[top]`"""


class PassDone(msgspec.Struct, frozen=True, tag="pass_done"):
    """What a `RunPass` gave, sequence by sequence."""

    call: int
    parts: tuple[PassPart, ...]


class Drawn(msgspec.Struct, frozen=True, tag="drawn"):
    """More of a `GenerateTokens`. Text never ends inside a character or a stop string."""

    call: int
    tokens: tuple[int, ...]
    text: str
    finish: str = ""
    """`stop`, `length` or `cancelled` with the last one."""
    length: int = 0
    pages: int = 0
    cached_tokens: int = 0


class Encoded(msgspec.Struct, frozen=True, tag="encoded"):
    """Tokens. One frame, u32."""

    call: int


class Decoded(msgspec.Struct, frozen=True, tag="decoded"):
    """Text."""

    call: int
    text: str


class Heard(msgspec.Struct, frozen=True, tag="heard"):
    """A message of the client; None where it will send no more."""

    call: int
    text: str | None


class HttpAnswer(msgspec.Struct, frozen=True, tag="http_answer"):
    """What a server answered. One frame: the body, as it came."""

    call: int
    status: int
    headers: tuple[tuple[str, str], ...]
    """Names in lower case."""


class ToolAnswer(msgspec.Struct, frozen=True, tag="tool_answer"):
    """What a tool returned. One frame: JSON."""

    call: int


class CallFailed(msgspec.Struct, frozen=True, tag="call_failed"):
    """A call was not carried out; nothing was changed by it, but that a recurrent model's state may be lost."""

    call: int
    trouble: Trouble
    message: str
    slot: int | None = None


FromHost = (
    Begin
    | SetState
    | PassDone
    | Drawn
    | Encoded
    | Decoded
    | Heard
    | HttpAnswer
    | ToolAnswer
    | CallFailed
)
"""Anything that a host says."""

decode_from_program = msgspec.msgpack.Decoder(FromProgram).decode
decode_from_host = msgspec.msgpack.Decoder(FromHost).decode
