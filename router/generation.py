"""One sequence on its way: what was asked, what has been made, who makes it now.

Covers the state that a retry or a resume needs. Does not cover the order of attempts
(`pie.router.dispatch`).
"""

from __future__ import annotations

import asyncio
import enum
import time
from array import array
from dataclasses import dataclass

import msgspec
from blake3 import blake3

from pie.page.events import PlaceId
from pie.page.key import RootKey
from pie.router.choice import Chosen
from pie.router.link import WorkerLink
from pie.router.mailbox import Mailbox
from pie.router.models import ServedModel
from pie.router.prefix import Prefix
from pie.router.prompt import Prompt
from pie.wire.messages import FinishReason, Grammar, Refused, Sampling, Started, TokenDelta


class Order(msgspec.Struct, frozen=True):
    """What is asked of any worker."""

    model: ServedModel
    prompt: Prompt
    prefix: Prefix
    """The prompt's ids and keys, shared by its choices."""
    max_tokens: int
    sampling: Sampling
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    grammar: Grammar | None = None
    grammar_param: str | None = None
    """The field that the grammar came from."""
    shows_special: bool = False
    shows_stop: bool = False
    param: str = "prompt"
    """The field that the prompt came from."""
    tenant_salt: str | None = None
    """Whose pages they are to rules: `pie.router.access.Caller.tenant_salt`."""
    session: str | None = None
    begins_session: bool = False
    """Whether the session is named after this request, so that nobody goes on with it where this fails."""
    priority: int = 0
    """Workers take a smaller one first."""
    prompt_logprobs: int | None = None
    """Likeliest tokens to report at each position of the prompt; None reports nothing."""
    only_place: PlaceId | None = None
    """Directs the request at one worker, for tools and tests."""
    arrived_s: float = 0.0
    """On `time.monotonic`'s clock."""


class Ending(enum.Enum):
    """How an attempt ended."""

    DONE = "done"
    GONE = "gone"
    """The worker is gone, or could not be reached."""
    REFUSED = "refused"
    FAILED = "failed"
    """The worker tried and cannot."""
    SILENT = "silent"
    """The worker said nothing for too long."""
    LATE = "late"
    """The request's time is up."""


@dataclass(slots=True)
class Tried:
    """One attempt, for whoever asks later."""

    chosen: Chosen[WorkerLink]
    after_tokens: int
    """Tokens of the answer that there were before it."""
    ending: str = "cancelled"
    """Why it ended; nobody says so of one that is cut short."""


class Generation:
    """One sequence: its order, the tokens made so far, and its present attempt.

    Args:
        request_id: Names it in every message, with the attempt's number.
        index: Its place among the choices of its HTTP request.
        order: What is asked.
        mailbox: Where its text goes.
        leader: The first choice of its prompt, which computes it for the others; None for that one
            itself.
    """

    def __init__(
        self,
        request_id: str,
        index: int,
        order: Order,
        mailbox: Mailbox,
        leader: Generation | None = None,
    ) -> None:
        self.request_id = request_id
        self.index = index
        self.order = order
        self.mailbox = mailbox
        self.leader = leader
        self.followers = 0
        """Choices that this one leads."""
        self.chosen: Chosen[WorkerLink] | None = None
        """The worker of the present attempt."""
        self.history: list[Tried] = []
        self.output_ids: array[int] = array("I")
        self.texts: list[str] = []
        self.started: Started | None = None
        """How the first attempt that made a token began."""
        self.place: PlaceId | None = None
        """The worker of the first token; until then the one that was asked last."""
        self.model_root: RootKey | None = None
        """Of the worker of the first token: another root is another model, whatever it is called."""
        self.attempts = 0
        self.predicted_tokens = 0
        self.first_token_s: float | None = None
        self.finish: FinishReason | None = None
        self.last_heard_s = 0.0
        self.refused: Refused | None = None
        """Why the worker of the present attempt does not take it."""
        self.failure = ""
        """Why it could not."""
        self._ended: asyncio.Future[Ending] | None = None

    @property
    def attempt_id(self) -> str:
        """The request id of the present attempt: late words of an earlier one go nowhere."""
        return f"{self.request_id}.{self.attempts}"

    @property
    def prefix(self) -> Prefix:
        """Prompt and output so far, as the next worker is sent them."""
        begun = self.order.prefix
        return begun.longer(self.output_ids) if self.output_ids else begun

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed."""
        return 0 if self.started is None else self.started.cached.total

    @property
    def text(self) -> str:
        """All text made so far."""
        return "".join(self.texts)

    def next_attempt(self) -> asyncio.Future[Ending]:
        """Begin another attempt and return the future of its end."""
        self.attempts += 1
        self.refused, self.failure = None, ""
        self.last_heard_s = time.monotonic()
        self._ended = asyncio.get_running_loop().create_future()
        return self._ended

    def on_delta(self, delta: TokenDelta) -> None:
        """Take new tokens from the worker.

        Words that come between an attempt's end and its sender learning of it go nowhere: another
        worker makes these tokens again, or the client has been told that there are no more.
        """
        if self._over:
            return
        self.last_heard_s = time.monotonic()
        if delta.finish_reason is FinishReason.FAILED:
            self.failure = delta.error or "the worker failed"
            self._end(Ending.FAILED)
            return
        if self.started is None:
            self.started = delta.started
        if self.first_token_s is None:
            self.first_token_s = self.last_heard_s
        self.output_ids.extend(delta.token_ids)
        if delta.text:
            self.texts.append(delta.text)
        self.finish = delta.finish_reason
        self.mailbox.add(self.index, delta)
        if delta.finish_reason is not None:
            self._end(Ending.DONE)

    def on_refused(self, refused: Refused) -> None:
        """Learn that the worker does not take it."""
        if self._over:
            return
        self.refused = refused
        self._end(Ending.REFUSED)

    def on_gone(self) -> None:
        """Learn that the worker is gone."""
        self._end(Ending.GONE)

    @property
    def _over(self) -> bool:
        """Whether no attempt is under way."""
        return self._ended is None or self._ended.done()

    def _end(self, ending: Ending) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(ending)


def derived_seed(seed: int, choice: int) -> int:
    """Return the seed of a choice; the first one's is the request's own."""
    if choice == 0:
        return seed
    digest = blake3(f"pie/choice/{seed}/{choice}".encode()).digest(8)
    return int.from_bytes(digest, "little") >> 1
