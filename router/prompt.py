"""From what a client asked to token ids, once.

Covers templates, tokenising, remembered answers and prompts that are too long. Does not cover
keys of pages and who holds them (`pie.router.choice`).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import msgspec
import numpy as np

from pie.router.errors import ApiError, invalid
from pie.router.memory import AnswerMemory, Said, Turn
from pie.router.turns import Turns
from pie.tokens.detokenizer import Detokenizer
from pie.tokens.errors import TemplateError, TextError
from pie.tokens.pieces import PieceEncoder, PieceMemory
from pie.tokens.template import ChatTemplate, Message
from pie.tokens.tokenizer import Tokenizer

T = TypeVar("T")

_ALL = 1 << 40
"""Room for any prompt."""

_PROBE_CHARS = 8
"""Characters for each token of the context that are tokenised first when a text has more: English
has four to five characters a token, so that a far too long text is told from its beginning."""

_THREAD_IDS = 1024
"""Ids of an answer that are turned to text here; more, at 2 µs each, are left to a thread."""

_THREAD_TURNS = 256
"""Messages whose template is rendered here; more, at 5 µs each and more, are left to a thread."""

_THREAD_TOOLS = 16
"""Tools whose schemas are rendered here."""

_NODE_CHARS = 8
"""What a value without text counts for where the size of what is rendered is estimated."""

_CONTEXT_IDS = 64
"""Ids of the prompt that the first characters of an answer may depend on, and more."""


class Conversation(msgspec.Struct, frozen=True):
    """What a chat template is given."""

    messages: Sequence[Message]
    turns: tuple[Turn, ...]
    """The same, as memory sees them."""
    tools: Sequence[Message] | None = None
    adds_prompt: bool = True
    """Whether the beginning of an answer follows."""
    continues: bool = False
    """Whether the last message is to be gone on with."""
    variables: Mapping[str, object] = msgspec.field(default_factory=dict)


class Prompt(msgspec.Struct, frozen=True):
    """A prompt's ids, and for a conversation what the next turn will need."""

    ids: array[int]
    rendered: str = ""
    said: Said | None = None
    """Under which name its answer is remembered; None where it is not."""


class PromptMaker:
    """Makes prompts for the models that share a tokenizer.

    Args:
        tokenizer: The models'.
        template: Its chat template; None where it has none.
        memory: Remembers answers.
        pieces: Remembers what texts were tokenised to.
        thread_bytes: Longer texts are tokenised in threads, so that no stream waits for them.
        turns: Where long texts go, their tenants in turn.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        *,
        memory: AnswerMemory,
        pieces: PieceMemory,
        thread_bytes: int,
        turns: Turns,
    ) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self._memory = memory
        self._thread_bytes = thread_bytes
        self._turns = turns
        self._pieces = PieceEncoder(tokenizer, _marks(tokenizer, template), pieces)
        # A text that goes on with one of these is tokenised the same whatever stood before it.
        self._breaks = tuple(self._pieces.cuts)

    async def conversation(
        self,
        asked: Conversation,
        *,
        model: str,
        salt: str | None,
        context_tokens: int,
        keep: int | None = None,
        tenant: str = "",
    ) -> Prompt:
        """Return the prompt of a tenant's conversation with a model, its last `keep` tokens where that is set.

        Raises:
            ApiError: The template does not take it, or it is longer than the context.
        """
        if self.template is None:
            raise invalid("model: has no chat template; use /v1/completions", "model")
        given = (asked.messages, asked.tools or (), asked.variables)
        long = len(asked.turns) > _THREAD_TURNS or len(asked.tools or ()) > _THREAD_TOOLS
        space = _space(self.tokenizer.digest, model, salt)
        return await self.run(
            # Whatever a template is given it may render, and at any length.
            long or _is_heavy(given, self._thread_bytes),
            lambda: self._conversation(asked, space, context_tokens, keep),
            tenant,
        )

    async def text(
        self, text: str, *, context_tokens: int, keep: int | None = None, tenant: str = ""
    ) -> Prompt:
        """Return the prompt of a plain text, its last `keep` tokens where that is set.

        Raises:
            ApiError: It is longer than the context, or has no tokens.
        """
        return await self.run(
            len(text) > self._thread_bytes, lambda: self._text(text, context_tokens, keep), tenant
        )

    async def bad_words(
        self, words: Sequence[str], *, tenant: str = ""
    ) -> tuple[tuple[int, ...], ...]:
        """Return words as token sequences, each as it is spelled at a beginning and amid a text.

        Raises:
            ApiError: One is not Unicode.
        """
        if not words:
            return ()

        def work() -> tuple[tuple[int, ...], ...]:
            found: dict[tuple[int, ...], None] = {}
            for word in words:
                for text in (word.lstrip(), f" {word.lstrip()}"):
                    if ids := tuple(self.tokenizer.encode(text)):
                        found[ids] = None
            return tuple(found)

        try:
            # Each is read twice, and a short one takes as long as a page's worth of a long text.
            return await self.run(_is_heavy(words, self._thread_bytes // 8), work, tenant)
        except TextError as error:
            raise invalid(f"bad_words: {error}", "bad_words") from error

    async def encode(self, text: str, *, add_special_tokens: bool, tenant: str = "") -> list[int]:
        """Return the ids of a text that is no prompt.

        Raises:
            ApiError: It is not Unicode.
        """
        long = len(text) > self._thread_bytes
        try:
            return await self.run(
                long,
                lambda: self.tokenizer.encode(text, add_special_tokens=add_special_tokens),
                tenant,
            )
        except TextError as error:
            raise invalid(f"prompt: {error}", "prompt") from error

    def tokens(
        self,
        ids: Sequence[int],
        *,
        context_tokens: int,
        vocab_size: int,
        keep: int | None = None,
    ) -> Prompt:
        """Return the prompt of token ids, the last `keep` of them where that is set.

        Raises:
            ApiError: It is longer than the context, or an id lies outside the vocabulary.
        """
        if not ids:
            raise invalid("prompt: must not be empty", "prompt")
        if keep is not None:
            ids = ids[-keep:]
        if len(ids) >= context_tokens:
            raise too_long("prompt", context_tokens, len(ids))
        try:
            packed = array("I", ids)
        except OverflowError:
            packed = None
        # A quarter of a million take 0.1 ms so, and 10 as Python's numbers.
        if packed is None or np.frombuffer(packed, np.uint32).max() >= vocab_size:
            raise invalid(f"prompt: token ids are at least 0 and below {vocab_size}", "prompt")
        return Prompt(packed)

    async def remember(
        self, prompt: Prompt, text: str, output_ids: Sequence[int], *, tenant: str = ""
    ) -> None:
        """Keep the ids of an answer, where the text that a client saw is just what they spell."""
        said = prompt.said
        if said is None or not prompt.rendered or not text:
            return
        ids = array("I", output_ids)
        long = len(ids) > _THREAD_IDS or self._is_long(len(prompt.rendered), said)
        await self.run(long, lambda: self._remember(prompt, said, text, ids), tenant)

    def _remember(self, prompt: Prompt, said: Said, text: str, ids: array[int]) -> None:
        special = self.tokenizer.special_ids
        if ids and ids[-1] in special:
            ids.pop()
        if any(id_ in special for id_ in ids):
            return
        # A stop string may have ended the answer: then its tokens are no part of the text.
        count = self._spelling(prompt, ids, text)
        if count is None:
            return
        del ids[count:]
        self._memory.remember(said, text, prompt.rendered, prompt.ids + ids)

    def _spelling(self, prompt: Prompt, ids: array[int], text: str) -> int | None:
        """Return how many of an answer's leading ids spell `text`; None where they do not."""
        context = prompt.ids[-_CONTEXT_IDS:].tolist()
        detokenizer = Detokenizer(self.tokenizer, context)
        # As a rule all of them do, and the last one is needed for it.
        begun = detokenizer.push(ids[:-1])
        if len(begun) < len(text):
            whole = begun + detokenizer.push(ids[-1:])
            if len(whole) < len(text):
                whole += detokenizer.flush()
            return len(ids) if whole == text else None
        detokenizer = Detokenizer(self.tokenizer, context)
        pieces: list[str] = []
        chars = count = 0
        while chars < len(text):
            piece = detokenizer.push(ids[count : count + 1])
            pieces.append(piece)
            chars += len(piece)
            count += 1
        return count if "".join(pieces) == text else None

    def _is_long(self, chars: int, said: Said) -> bool:
        """Whether a conversation would stall streams."""
        return chars > self._thread_bytes or len(said.turns) > _THREAD_TURNS

    async def run(self, long: bool, work: Callable[[], T], tenant: str) -> T:
        """Do short work here, and long work in a thread when it is the tenant's turn.

        Raises:
            ApiError: Too much waits.
        """
        return await self._turns.run(tenant, work) if long else work()

    def _conversation(
        self, asked: Conversation, space: bytes, context_tokens: int, keep: int | None
    ) -> Prompt:
        assert self.template is not None
        try:
            rendered = self.template.render(
                asked.messages,
                tools=asked.tools,
                add_generation_prompt=asked.adds_prompt and not asked.continues,
                **asked.variables,
            )
        except TemplateError as error:
            raise invalid(f"messages: {error}", "messages") from error
        turns = asked.turns
        if asked.continues:
            rendered = _up_to_last(rendered, turns[-1].text)
        if keep is not None:
            ids = self._remembering(space, rendered, _ALL)[-keep:]
            if len(ids) >= context_tokens:
                raise too_long("messages", context_tokens, len(ids))
            return Prompt(ids)
        said = Said(space, turns)
        known = self._memory.recall(said, rendered)
        if known is not None and rendered.startswith(self._breaks, known.chars):
            room = context_tokens - len(known.ids)
            ids = known.ids + self._remembering(space, rendered[known.chars :], room)
        else:
            ids = self._remembering(space, rendered, context_tokens)
        if len(ids) >= context_tokens:
            raise too_long("messages", context_tokens, len(ids))
        return Prompt(ids, rendered, said)

    def _text(self, text: str, context_tokens: int, keep: int | None) -> Prompt:
        room = context_tokens if keep is None else _ALL
        ids = self._encode(text, "prompt", room, add_special_tokens=True)[-(keep or 0) :]
        if not ids:
            raise invalid("prompt: has no tokens", "prompt")
        if len(ids) >= context_tokens:
            raise too_long("prompt", context_tokens, len(ids))
        return Prompt(array("I", ids))

    def _remembering(self, space: bytes, text: str, room: int) -> array[int]:
        """Return the ids of a rendered conversation, or of its end."""
        return self._pieces.encode(space, text, lambda part: self._encode(part, "messages", room))

    def _encode(
        self, text: str, param: str, room: int, *, add_special_tokens: bool = False
    ) -> list[int]:
        """Return the ids of `text`; refuse a far too long one without reading it all."""
        probe = _PROBE_CHARS * max(room, 64)
        try:
            if len(text) > 2 * probe:
                seen = len(self.tokenizer.encode(text[:probe]))
                # The probe's last word may be cut, which can only add a few tokens.
                if seen > room + 64:
                    raise too_long(param, room, seen, at_least=True)
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except TextError as error:
            raise invalid(f"{param}: {error}", param) from error


def _is_heavy(values: object, most_chars: int) -> bool:
    """Whether texts, in whatever JSON they are nested, have more characters; looks at no more than it must."""
    left, stack = most_chars, [values]
    while stack:
        value = stack.pop()
        if isinstance(value, str):
            left -= len(value)
        elif isinstance(value, dict):
            left -= _NODE_CHARS * len(value)
            if left >= 0:
                stack += (*value, *value.values())
        elif isinstance(value, list | tuple):
            left -= _NODE_CHARS * len(value)
            if left >= 0:
                stack += value
        if left < 0:
            return True
    return False


def _marks(tokenizer: Tokenizer, template: ChatTemplate | None) -> Iterator[str]:
    """Yield the tokens that a template puts between messages, and those that end an answer."""
    if template is None:
        return
    for token in tokenizer.added_tokens:
        if token.content in template.source:
            yield token.content
    for id_ in tokenizer.eos_token_ids:
        if token_of_end := tokenizer.token(id_):
            yield token_of_end


def _up_to_last(rendered: str, text: str) -> str:
    """Return a rendered conversation up to the end of its last message's text.

    Raises:
        ApiError: The template does not show that text as it is.
    """
    at = rendered.rfind(text.strip())
    if at < 0:
        raise invalid(
            "continue_final_message: the chat template changes the last message",
            "continue_final_message",
        )
    return rendered[: at + len(text.strip())]


def _space(digest: str, model: str, salt: str | None) -> bytes:
    """Return what keeps remembered answers apart; no two differ alike."""
    return msgspec.msgpack.encode((digest, model, salt))


def too_long(param: str, context_tokens: int, tokens: int, *, at_least: bool = False) -> ApiError:
    """Return the 400 for a prompt that leaves no room for an answer."""
    return invalid(
        f"{param}: this model's maximum context length is {context_tokens} tokens, "
        f"and the prompt has {'at least ' if at_least else ''}{tokens}",
        param,
        "context_length_exceeded",
    )
