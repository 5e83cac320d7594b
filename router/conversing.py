"""A chat's body as what a model is asked, and how its answer is read.

Covers what a chat template is given, which grammar an answer must follow that has to call a tool, and
what reads an answer with reasoning and calls. Does not cover rendering (`pie.router.prompt`) or
reading (`pie.router.reading`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from pie.router.api.chat import ChatBody
from pie.router.api.conversation import ChatMessage, ConversationBody
from pie.router.api.structured import only_one
from pie.router.api.tools import NamedTool, Tool
from pie.router.errors import invalid
from pie.router.memory import Turn
from pie.router.prompt import Conversation, Prompt, PromptMaker
from pie.router.reading import THINK, THOUGHT, AnswerReader
from pie.router.tool_formats import ToolFormat, calling_grammar, format_of
from pie.wire.messages import Grammar

_MOST_CALLS = 1024


def conversation(body: ConversationBody) -> Conversation:
    """Return what the model's chat template is given."""
    return Conversation(
        messages=[message.plain() for message in body.messages],
        turns=tuple(_turn(message) for message in body.messages),
        tools=[tool.plain() for tool in body.tools] if body.tools else None,
        adds_prompt=body.add_generation_prompt is not False,
        continues=bool(body.continue_final_message),
        variables=body.chat_template_kwargs or {},
    )


class Calling:
    """How a model calls the tools of one request.

    Args:
        body: The request.
        prompts: The model's.

    Raises:
        ApiError: The model can call none.
    """

    def __init__(self, body: ChatBody, prompts: PromptMaker) -> None:
        self._prompts = prompts
        self._choice = body.tool_choice
        self._tools: Sequence[Tool] = body.tools or ()
        self._several = body.parallel_tool_calls is not False
        self._separates = body.separate_reasoning is not False
        self.format: ToolFormat | None = None
        if self._tools and self._choice != "none":
            self.format = self._known_format()

    @property
    def shows_special(self) -> bool:
        """Whether special tokens must be part of the text, because one of them begins a call."""
        return self._begin_id is not None

    def grammar(self, other: tuple[str, Grammar] | None) -> tuple[str, Grammar] | None:
        """Return what the answer must match; `other` is what else was asked for.

        Raises:
            ApiError: A call and something else must be answered.
        """
        if self.format is None or self._choice in (None, "auto"):
            return other
        tools, several = self._tools, self._several
        if isinstance(self._choice, NamedTool):
            name = self._choice.function.name
            tools, several = [tool for tool in tools if tool.function.name == name][:1], False
        grammar = calling_grammar(self.format, tools, several=several, begin_id=self._begin_id)
        return only_one(other, ("tool_choice", grammar))

    def reader(self, prompt: Prompt) -> Callable[[], AnswerReader] | None:
        """Return what makes a reader for each choice; None where all text is content."""
        reasons = self._separates and self._reasons
        if self.format is None and not reasons:
            return None
        return partial(
            AnswerReader,
            self.format,
            reasons=reasons,
            is_thinking=prompt.rendered.rstrip().endswith(THINK),
            most_calls=_MOST_CALLS if self._several else 1,
        )

    @property
    def _reasons(self) -> bool:
        template = self._prompts.template
        return template is not None and THOUGHT in template.source

    @property
    def _begin_id(self) -> int | None:
        """The special token that begins a call; None where it is plain text."""
        if self.format is None:
            return None
        tokenizer = self._prompts.tokenizer
        id_ = tokenizer.token_id(self.format.begin)
        return id_ if id_ in tokenizer.special_ids else None

    def _known_format(self) -> ToolFormat:
        template = self._prompts.template
        if template is None or "tools" not in template.variables:
            raise invalid(
                "tools: this model's chat template takes no tools",
                "tools",
                "unsupported_parameter",
            )
        found = format_of(template.source)
        if found is None:
            raise invalid(
                "tools: this model spells calls in a way that is not known here; known are those "
                "of Hermes and Qwen, Llama 3 and Mistral",
                "tools",
                "unsupported_parameter",
            )
        return found


def _turn(message: ChatMessage) -> Turn:
    """Return a message as memory tells it from others."""
    text = message.text
    if message.tool_calls:
        text += msgspec.json.encode([call.plain() for call in message.tool_calls]).decode()
    return Turn("system" if message.role == "developer" else message.role, text)
