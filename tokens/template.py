"""Conversations to text, by a model's own chat template.

Covers finding the template, what it is given, and errors that say what is wrong. Does not cover
the environment that it runs in (`pie.tokens.sandbox`) or tokens.

It gives what transformers' `apply_chat_template(tokenize=False)` gives for the same folder, which
the tests hold it to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import NoReturn

import jinja2
import jinja2.meta

from pie.tokens.errors import TemplateError, TemplateLimitError, TokensError
from pie.tokens.files import DEFAULT_TEMPLATE, TOOL_TEMPLATE, TokenFiles
from pie.tokens.limits import TemplateLimits, limited
from pie.tokens.sandbox import ChatEnvironment, Clock

Message = Mapping[str, object]

_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
"""Names that a message's reasoning goes by; templates read the first, some the second."""

_SOURCE_CHARS = 256 * 1024
"""Length of a template, many times that of the longest in use; it takes seconds to compile."""
_REASON_CHARS = 300
_SCALARS = (str, int, float, bool)


class ChatTemplate:
    """A model's chat templates. Safe to use from several threads.

    Use `ChatTemplate.load`.

    Attributes:
        names: Its templates; most models have `default` alone, some `tool_use` beside it.
        variables: What its templates read, such as `tools` or `enable_thinking`.
        source: Their sources, one after the other.
    """

    def __init__(
        self,
        templates: Mapping[str, str],
        special_tokens: Mapping[str, str],
        *,
        limits: TemplateLimits | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Compile templates.

        Args:
            templates: Sources by name.
            special_tokens: Text of special tokens by name, such as `bos_token`.
            limits: What one rendering may take.
            clock: Tells the local time.

        Raises:
            TemplateError: One of them does not compile.
        """
        self._special_tokens = dict(special_tokens)
        self._limits = limits if limits is not None else TemplateLimits()
        environment = ChatEnvironment(clock if clock is not None else _local_time)
        self._compiled: dict[str, jinja2.Template] = {}
        variables: set[str] = set()
        for name, source in templates.items():
            if len(source) > _SOURCE_CHARS:
                raise TemplateError(
                    f"The chat template {name!r} is longer than {_SOURCE_CHARS} characters."
                )
            try:
                variables |= jinja2.meta.find_undeclared_variables(environment.parse(source))
                self._compiled[name] = environment.compile_chat(source)
            except jinja2.TemplateSyntaxError as error:
                raise TemplateError(
                    f"The chat template {name!r} has a mistake in line {error.lineno}: "
                    f"{_sentence(str(error.message))}"
                ) from error
            # What is nested too deep fails in Python's compiler, each release in its own way.
            except (RecursionError, SyntaxError, MemoryError, ValueError) as error:
                raise TemplateError(
                    f"The chat template {name!r} does not compile: {_compile_reason(error)}"
                ) from error
        self.names = tuple(self._compiled)
        self.variables = frozenset(variables)
        self.source = "\n".join(templates.values())

    @classmethod
    def load(
        cls, folder: Path, *, limits: TemplateLimits | None = None, clock: Clock | None = None
    ) -> ChatTemplate | None:
        """Load the templates of a model's folder; `None` where it has none.

        They are `chat_template.jinja` and `additional_chat_templates/*.jinja`, or else
        `chat_template` in `tokenizer_config.json`: one, or several with names.

        Raises:
            TokenizerError: The folder or one of its files is missing or broken.
            TemplateError: A template does not compile.
        """
        files = TokenFiles(Path(folder))
        if not files.templates:
            return None
        return cls(files.templates, files.named_tokens, limits=limits, clock=clock)

    def render(
        self,
        messages: Sequence[Message],
        /,
        *,
        tools: Sequence[Message] | None = None,
        add_generation_prompt: bool = True,
        **variables: object,
    ) -> str:
        """Return the text of a conversation, special tokens spelt out.

        Args:
            messages: The conversation, in OpenAI's shape. Fields that are `None` are left out.
            tools: JSON schemas of the tools that the model may call; chooses the template
                `tool_use` where there is one.
            add_generation_prompt: End with the beginning of the assistant's answer.
            variables: What else the template may read; they may replace special tokens, but
                not the arguments above.

        Raises:
            TemplateRefusedError: The template does not take this conversation, in its own words.
            TemplateLimitError: It ran or grew past the limits.
            TemplateError: It failed otherwise; the message names the line and the reason.
        """
        if not messages:
            raise TemplateError("A conversation needs at least one message.")
        try:
            given = self._given(messages, tools, variables)
        except RecursionError as error:
            raise TemplateError("The conversation is nested too deep.") from error
        given["add_generation_prompt"] = add_generation_prompt
        template = self._choose(with_tools=tools is not None)
        pieces: list[str] = []
        chars = 0
        try:
            with limited(self._limits) as run:
                for piece in template.generate(given):
                    chars += len(piece)
                    run.check_size(chars)
                    pieces.append(piece)
        except TemplateLimitError as error:
            line = _line(error.__traceback__)
            if line is None:
                raise
            raise TemplateLimitError(f"{str(error).rstrip('.')} (line {line}).") from error
        except TokensError:
            raise
        # A template is a program: it can raise whatever Python can.
        except Exception as error:  # noqa: BLE001
            _fail(error)
        return "".join(pieces)

    def _given(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] | None,
        variables: Mapping[str, object],
    ) -> dict[str, object]:
        """Return what the template may read."""
        return {
            **self._special_tokens,
            **{name: _plain(value) for name, value in variables.items()},
            "messages": [_message(message) for message in messages],
            "tools": _plain(tools),
            "documents": _plain(variables.get("documents")),
        }

    def _choose(self, *, with_tools: bool) -> jinja2.Template:
        """Return the template to use."""
        if len(self._compiled) == 1:
            return next(iter(self._compiled.values()))
        for name in (TOOL_TEMPLATE, DEFAULT_TEMPLATE) if with_tools else (DEFAULT_TEMPLATE,):
            if name in self._compiled:
                return self._compiled[name]
        raise TemplateError(
            f"The model has the chat templates {', '.join(sorted(self.names))}, and none of them "
            f"is called {DEFAULT_TEMPLATE!r}."
        )


def _message(message: Message) -> dict[str, object]:
    """Return a message of plain values, without empty fields, its reasoning by every name."""
    plain = {str(name): _plain(value) for name, value in message.items() if value is not None}
    for name in _REASONING_NAMES:
        if name in plain:
            reasoning = plain[name]
            return {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    return plain


def _plain(value: object) -> object:
    """Return `value` as plain JSON types, so that a template can call nothing of ours."""
    if value is None or type(value) in _SCALARS:
        return value
    if isinstance(value, _SCALARS):
        return _value(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return [_plain(item) for item in value]
    return f"<{type(value).__name__}>"


def _value(scalar: str | float) -> str | float:
    """Return the bare value of what may be an enumeration's member or another subclass."""
    if isinstance(scalar, str):
        return str.__str__(scalar)
    return int(scalar) if isinstance(scalar, int) else float(scalar)


def _fail(error: Exception) -> NoReturn:
    """Raise a template's failure as one sentence."""
    line = _line(error.__traceback__)
    where = f" in line {line}" if line is not None else ""
    raise TemplateError(f"The chat template failed{where}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """Return what a person is told of an error, in one line and with a full stop."""
    if isinstance(error, jinja2.TemplateError):
        return _sentence(error.message or type(error).__name__)
    if isinstance(error, RecursionError):
        return "something is nested too deep, or a macro calls itself without end."
    if isinstance(error, MemoryError):
        return "it takes too much memory."
    return _sentence(f"{type(error).__name__}: {error}")


def _compile_reason(error: Exception) -> str:
    """Return why a template does not compile; a line would be one of the Python made of it."""
    if isinstance(error, RecursionError | MemoryError):
        return "something is nested too deep."
    return _sentence(error.msg if isinstance(error, SyntaxError) else str(error))


def _sentence(text: str) -> str:
    """Return `text` short and in one line; errors quote what they stumbled over."""
    words = " ".join(text[: 2 * _REASON_CHARS].split())
    if len(words) > _REASON_CHARS:
        words = f"{words[:_REASON_CHARS]}…"
    return f"{words.rstrip('.')}."


def _line(traceback: TracebackType | None) -> int | None:
    """Return the template's line in which an error arose."""
    line = None
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename in ("<template>", "<unknown>"):
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return line


def _local_time() -> datetime:
    # Templates write the date where the server is, as transformers has it.
    return datetime.now()  # noqa: DTZ005
