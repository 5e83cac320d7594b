"""Every message between processes.

Covers what routers, workers and pool nodes say to each other; what is about users' programs is in
`pie.wire.program_runs`. Does not cover sockets (`pie.wire.client`, `pie.wire.server`). A message is a msgspec header and any number of raw
payload frames; each docstring says what its frames are. Nothing is pickled.

Every message carries the epoch of the place that it is for or from: a message for an earlier
start of a place is refused with `Refused(code=STALE_EPOCH)`.
"""

from __future__ import annotations

import enum

import msgspec

from pie.page.events import Epoch, PlaceId
from pie.page.header import PageHeader
from pie.page.key import PageKey
from pie.wire.orders import ChangeResult, PinPages, RemovePages, UnpinPages
from pie.wire.place_orders import (
    BringNear,
    Drained,
    DrainNode,
    LetGoOf,
    PagesMoved,
    StoreInPool,
    TakeAgain,
    TakesAgain,
)
from pie.wire.program_runs import ProgramEvents, ProgramTold, StartProgram, TellProgram


class RefusalCode(enum.StrEnum):
    """Why a message or a request was not carried out."""

    STALE_EPOCH = "stale_epoch"
    BAD_MESSAGE = "bad_message"
    OVERLOADED = "overloaded"
    CONTEXT_LENGTH = "context_length"
    DRAINING = "draining"
    FAILED = "failed"
    BAD_GRAMMAR = "bad_grammar"


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The message with this id was not carried out."""

    request_id: str
    code: RefusalCode
    message: str
    retry_after_s: float | None = None


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Are you there? Answered by `Pong`."""

    request_id: str


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    """I am here, in this epoch."""

    request_id: str
    epoch: Epoch


class Credit(msgspec.Struct, frozen=True, tag="credit"):
    """The receiver has handled this many messages; the sender may send as many more."""

    messages: int


# Status: anyone to a place


class AskStatus(msgspec.Struct, frozen=True, tag="ask_status"):
    """What have you counted? Answered by `StatusReport`, whatever the place's epoch is."""

    request_id: str


class StatusReport(msgspec.Struct, frozen=True, tag="status_report"):
    """What a place says of itself; `pie.wire.figures` makes it from the place's own status."""

    request_id: str
    place: PlaceId
    epoch: Epoch
    state: str
    """`serving`, or what keeps the place from it, such as `draining`."""
    counters: dict[str, int | float] = {}
    """What only grows, since this start. A name with a dot is one of several: `bad_pages.at_load`."""
    gauges: dict[str, int | float] = {}
    """What goes up and down, as it is now; named alike."""


# Generation: router to worker


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the next token is drawn. `temperature` 0 is greedy.

    A seeded draw is a pure function of the seed and the output position.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None
    """How many of the likeliest tokens to report at each position; None reports nothing."""
    repetition_penalty: float = 1.0
    """Divides the positive logits of tokens in prompt and output, and multiplies the negative ones."""
    min_tokens: int = 0
    """No token ends the answer before there are so many; a grammar that has ended does."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences of which none is in the answer; a grammar goes before them."""


class GrammarKind(enum.StrEnum):
    """How a grammar is written."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    """A JSON list of strings."""
    LARK = "lark"
    """A Lark grammar as llguidance reads it, in which `<name>` is a special token."""


class Grammar(msgspec.Struct, frozen=True):
    """What an answer must match as a whole."""

    kind: GrammarKind
    text: str


class Generate(msgspec.Struct, frozen=True, tag="generate"):
    """Continue a sequence. One frame: token ids, unsigned 32-bit little-endian.

    Answered by `StepTokens` that carry this id until one has a finish reason, or by `Refused`.
    """

    request_id: str
    epoch: Epoch
    output_start: int
    """Where in the frame's tokens the prompt ends; what follows was generated earlier."""
    max_tokens: int
    """Tokens to generate in all, those from `output_start` on included."""
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    grammar: Grammar | None = None
    shows_special: bool = False
    """Whether the answer's text has special tokens, those that end it left out."""
    shows_stop: bool = False
    """Whether the answer's text has the stop string that ends it."""
    salt: str | None = None
    tenant_tag: str = ""
    session_tag: str = ""
    """Stands for the conversation that the request belongs to; empty where it names none."""
    fork_of: str | None = None
    """Request id of one of this router's with the same prompt: this one is forked off it when its
    prompt is computed. Where it is not there, has a token already or has other tokens, this one
    goes its own way."""
    forks: int = 0
    """So many requests that are to be forked off this one follow at once: it waits for them a
    moment."""
    deadline_s: float | None = None
    """Seconds from receipt after which the worker gives the request up."""
    prompt_logprobs: int | None = None
    """How many of the likeliest tokens to report at each position of the prompt, with the first token;
    the whole prompt is computed for it. None reports nothing."""
    priority: int = 0
    """Among those that wait, or must yield, a smaller one is served first."""
    await_pages: int = 0
    """So many leading pages of the prompt another worker is computing and the pool has soon: they are
    waited for before the request takes its place in the queue."""
    await_s: float = 0.0
    """Longest wait for them; then the request goes on with what there is."""


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Give the request up and free what it holds. Not answered."""

    request_id: str


# Generation: worker to router


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """A token, its text as bytes, and its log-probability."""

    token_id: int
    token: bytes
    logprob: float


class PositionLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """The token drawn at a position and the likeliest ones there."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]


class CachedTokens(msgspec.Struct, frozen=True, array_like=True):
    """Prompt tokens that were not computed, by where their pages came from."""

    device: int = 0
    host: int = 0
    disk: int = 0
    pool: int = 0

    @property
    def total(self) -> int:
        """All tokens that were not computed."""
        return self.device + self.host + self.disk + self.pool


class FinishReason(enum.StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    FAILED = "failed"


class LoadSource(msgspec.Struct, frozen=True, array_like=True):
    """Pages of a request's prompt in one tier, and what became of them."""

    tier: str
    """`host`, `disk` or `pool`."""
    pages: int
    """Those that were looked for there; a pool may turn out to have fewer."""
    load_ms: float
    """How long their load was estimated to take; 0 where nothing was known yet."""
    compute_ms: float
    """How long computing their tokens was estimated to take."""
    chosen: bool
    """Whether they were to be loaded."""
    loaded_pages: int = 0
    took_ms: float = 0.0


class LoadDecision(msgspec.Struct, frozen=True, array_like=True):
    """Why pages were loaded or computed; the sources in the order of the prompt."""

    sources: tuple[LoadSource, ...]
    overran: bool = False
    """Whether the load was given up because it took longer than estimated."""


class MissReason(enum.StrEnum):
    """Why prompt tokens had to be computed."""

    NEVER_COMPUTED = "never-computed"
    """As far as anybody knows."""
    EVICTED = "evicted"
    """The worker had it a while ago, and it lies in no lower tier."""
    OPAQUE = "opaque"
    """The worker computed it under a mask or with gaps, so that it has no name."""
    NO_SNAPSHOT = "no-snapshot"
    """The pages are there, but no recurrent state to go on from."""
    NO_ROOM = "no-room"
    """It was to be loaded, and there was no room to begin."""
    LOAD_SLOWER = "load-slower"
    """A lower tier or the pool had it, and computing was estimated to be faster."""
    LOAD_LATE = "load-late"
    """Its load was given up, because it took longer than estimated."""
    LOAD_FAILED = "load-failed"
    """Its load brought nothing: a damaged page, or a node or disk that failed."""
    STALE_INDEX = "stale-index"
    """The index said that the worker or the pool had it, and it was not there."""
    OTHER_WORKER = "other-worker"
    """Another worker has it, and this one was chosen all the same."""
    TENANT = "tenant"
    """Somebody else has it, whose salt keeps the two apart."""
    PARTIAL_PAGE = "partial-page"
    """It lies behind the last full page; only full pages are kept."""
    LAST_TOKEN = "last-token"  # noqa: S105
    """The last token is always computed: its logits are in no page."""


class MissedPages(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive pages that a worker did not have in device memory, as it knows why."""

    reason: MissReason
    pages: int


class Started(msgspec.Struct, frozen=True, array_like=True):
    """How a request began; comes with its first tokens."""

    cached: CachedTokens
    queued_ms: float
    """What is left of the time to the first token: waiting for others."""
    load_ms: float
    prefill_ms: float
    """Time of the steps that computed the prompt, its share of them."""
    load: LoadDecision | None = None
    """None where no page beyond device memory was looked for."""
    missed_from: int = 0
    """Leading pages that were in device memory when its turn came."""
    missed: tuple[MissedPages, ...] = ()
    """What the worker knows of the full pages after them."""


class TokenDelta(msgspec.Struct, frozen=True, array_like=True):
    """What one step added to one request. Text never ends inside a character or a stop string."""

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None = None
    started: Started | None = None
    logprobs: tuple[PositionLogprobs, ...] | None = None
    stop_string: str | None = None
    error: str | None = None
    """Set with `FinishReason.FAILED`: what went wrong, in one sentence."""
    prompt_logprobs: tuple[PositionLogprobs, ...] | None = None
    """With a request's first token, where it asked: of the prompt's tokens from the second on."""


class Load(msgspec.Struct, frozen=True, array_like=True):
    """How busy a worker is."""

    running: int
    waiting: int
    waiting_tokens: int
    """Prompt tokens that wait for prefill."""
    free_pages: int
    total_pages: int
    prefill_tokens_per_s: float
    step_ms: float


class StepTokens(msgspec.Struct, frozen=True, tag="step"):
    """All that one engine step made for one router. Costs the router one credit."""

    epoch: Epoch
    deltas: tuple[TokenDelta, ...]
    load: Load


# Pages: anyone to a pool node


class Lookup(msgspec.Struct, frozen=True, tag="lookup"):
    """Which of these pages do you hold? Answered by `LookupResult`."""

    request_id: str
    epoch: Epoch
    pages: tuple[tuple[PageKey, int], ...]
    """Key and part of each page."""


class LookupResult(msgspec.Struct, frozen=True, tag="lookup_result"):
    """A `pie.page.lookup.LookupStatus` for each page asked for, in order."""

    request_id: str
    statuses: tuple[int, ...]


class GetPages(msgspec.Struct, frozen=True, tag="get"):
    """Send these pages. Answered by one `PageData` for each, in order."""

    request_id: str
    epoch: Epoch
    pages: tuple[tuple[PageKey, int], ...]
    slots: tuple[tuple[int, int], ...] = ()
    """For each page offset and size of where in the memory of `ShareMemory` it may be put; size 0, or no
    slots at all, where it is to be sent."""


class PageData(msgspec.Struct, frozen=True, tag="page"):
    """One page of a `GetPages`. One frame, the payload, where `header` is set; else none."""

    request_id: str
    position: int
    status: int
    """A `pie.page.lookup.LookupStatus`."""
    header: PageHeader | None = None
    in_slot: bool = False
    """Whether the payload lies in the page's slot, so that there is no frame."""


class PutPages(msgspec.Struct, frozen=True, tag="put"):
    """Keep these pages. A frame for each header, its payload. Answered by `PutResult`."""

    request_id: str
    epoch: Epoch
    headers: tuple[PageHeader, ...]
    may_evict: bool = True
    """Whether other pages may leave for them; else they are refused where there is no room."""


class PutStatus(enum.IntEnum):
    """What became of a page that was put."""

    STORED = 0
    HELD = 1
    """It was there already, complete."""
    PENDING = 2
    """Another writer came first and is not done."""
    REFUSED = 3
    """No room, or the payload does not match its checksum."""


class PutResult(msgspec.Struct, frozen=True, tag="put_result"):
    """A `PutStatus` for each page, in order."""

    request_id: str
    statuses: tuple[int, ...]


class StoreWanted(msgspec.Struct, frozen=True, tag="wanted"):
    """Would you take these pages? Answered by `LookupResult`: only `MISS` ones are wanted."""

    request_id: str
    epoch: Epoch
    pages: tuple[tuple[PageKey, int], ...]


class ShareMemory(msgspec.Struct, frozen=True, tag="share"):
    """You may put pages here, if you are on my host. Answered by `MemoryShared` or `Refused`.

    It replaces what this client has shared before.
    """

    request_id: str
    epoch: Epoch
    pid: int
    file: int
    """A descriptor of that process."""
    size_bytes: int
    token: bytes
    """What the memory begins with."""


class MemoryShared(msgspec.Struct, frozen=True, tag="shared"):
    """The memory can be written to."""

    request_id: str


Message = (
    Refused
    | Ping
    | Pong
    | Credit
    | AskStatus
    | StatusReport
    | Generate
    | Cancel
    | StepTokens
    | Lookup
    | LookupResult
    | GetPages
    | PageData
    | PutPages
    | PutResult
    | StoreWanted
    | RemovePages
    | PinPages
    | UnpinPages
    | ChangeResult
    | StoreInPool
    | BringNear
    | LetGoOf
    | PagesMoved
    | ShareMemory
    | MemoryShared
    | DrainNode
    | Drained
    | TakeAgain
    | TakesAgain
    | StartProgram
    | ProgramEvents
    | TellProgram
    | ProgramTold
)
"""Anything that travels; `pie.wire.codec` encodes and decodes this union."""
