"""An answer's text, read while it comes: reasoning, content, and calls of tools.

Covers telling the parts apart so that streams can send each as soon as it is known to be what it
is. Pure. Does not cover formats (`pie.router.tool_formats`) or shapes (`pie.router.api`).

What begins like a call and turns out to be none is content. Arguments are passed on as the model
wrote them, from the moment that the function's name is known; where a model writes the arguments
first, or as a string, the call is passed on when it is complete.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence

import msgspec

from pie.router.tool_formats import ToolFormat

THINK, THOUGHT = "<think>", "</think>"

_MOST_HEAD = 4096
"""Characters within which a call must have named its function, to be passed on before its end."""
_JSON = json.JSONDecoder()
_BLANK = " \t\r\n"


class Content(msgspec.Struct, frozen=True):
    """Text for the user."""

    text: str


class Reasoning(msgspec.Struct, frozen=True):
    """Text that the model wrote to itself."""

    text: str


class CallBegun(msgspec.Struct, frozen=True):
    """A call whose function is known."""

    index: int
    name: str


class CallArguments(msgspec.Struct, frozen=True):
    """More of a call's arguments, a JSON text in pieces."""

    index: int
    text: str


Part = Content | Reasoning | CallBegun | CallArguments


class AnswerReader:
    """Reads one answer.

    Args:
        format_: How calls are spelled; None reads none.
        reasons: Whether the model writes `<think>…</think>` before its answer.
        is_thinking: Whether the prompt ends amid that.
        most_calls: Calls that are passed on; what follows them is dropped.
    """

    def __init__(
        self,
        format_: ToolFormat | None = None,
        *,
        reasons: bool = False,
        is_thinking: bool = False,
        most_calls: int = 1024,
    ) -> None:
        self.calls = 0
        """Calls that have begun."""
        self._format = format_
        self._most_calls = most_calls
        self._held = ""
        self._state = self._content
        self._called = False
        self._call: _Call | None = None
        if reasons:
            self._state = self._thinking if is_thinking else self._may_think
        elif format_ is not None and format_.is_bare:
            self._state = self._may_call

    def push(self, text: str) -> list[Part]:
        """Take more text and return what is known of it now."""
        self._held += text
        return self._run(is_over=False)

    def end(self) -> list[Part]:
        """Return what was held back: no more text comes."""
        return self._run(is_over=True)

    def _run(self, *, is_over: bool) -> list[Part]:
        parts: list[Part] = []
        while True:
            before = (self._state, len(self._held))
            parts += self._state(is_over=is_over)
            if before == (self._state, len(self._held)) or (not self._held and not is_over):
                return _merged(parts)

    def _may_think(self, *, is_over: bool) -> Iterator[Part]:
        """The answer's beginning, of a model that may reason."""
        seen = self._held.lstrip(_BLANK)
        if seen.startswith(THINK):
            self._held = seen[len(THINK) :]
            self._state = self._thinking
        elif is_over or not THINK.startswith(seen):
            self._state = self._after_thought if self._is_bare else self._content
        return iter(())

    def _thinking(self, *, is_over: bool) -> Iterator[Part]:
        at = self._held.find(THOUGHT)
        if at >= 0:
            text, self._held = self._held[:at], self._held[at + len(THOUGHT) :]
            self._state = self._after_thought
        else:
            text, self._held = _safe(self._held, (THOUGHT,), is_over=is_over)
        if text:
            yield Reasoning(text)

    def _after_thought(self, *, is_over: bool) -> Iterator[Part]:
        """Blanks between reasoning and answer are neither's."""
        self._held = self._held.lstrip(_BLANK)
        if self._held or is_over:
            self._state = self._may_call if self._is_bare else self._content
        return iter(())

    def _may_call(self, *, is_over: bool) -> Iterator[Part]:
        """The answer's beginning, where a call may stand without a marker."""
        assert self._format is not None
        seen = self._held.lstrip(_BLANK)
        if seen.startswith("{"):
            self._held = seen
            self._begin()
        elif seen.startswith(self._format.begin):
            self._held = seen[len(self._format.begin) :]
            self._begin(self._format.begin)
        elif is_over or not self._format.begin.startswith(seen):
            self._state = self._content
        return iter(())

    def _content(self, *, is_over: bool) -> Iterator[Part]:
        if self._format is None:
            text, self._held = self._held, ""
        else:
            at = self._held.find(self._format.begin)
            if at >= 0:
                text, self._held = self._held[:at], self._held[at + len(self._format.begin) :]
                self._begin(self._format.begin)
            else:
                text, self._held = _safe(self._held, (self._format.begin,), is_over=is_over)
        # What stands around calls is layout.
        if text and not (self._called and not text.strip(_BLANK)):
            yield Content(text)

    def _begin(self, mark: str = "") -> None:
        assert self._format is not None
        self._call = _Call(self._format, self.calls)
        self._call.mark = mark
        self._state = self._calling

    def _calling(self, *, is_over: bool) -> Iterator[Part]:
        """Within what began like a call."""
        call = self._call
        assert call is not None
        if not call.text:
            begun = self._held.lstrip(_BLANK + ("[" if call.format.is_list else ""))
            call.lead += self._held[: len(self._held) - len(begun)]
            self._held = begun
        parts = call.push(self._held)
        self._held = ""
        if call.index < self._most_calls:
            self._called |= bool(parts)
            self.calls += sum(isinstance(part, CallBegun) for part in parts)
            yield from parts
        if call.is_done:
            self._held, self._call = call.rest, None
            self._state = self._between
        elif call.is_broken or is_over:
            self._call, self._format = None, None
            self._state = self._content
            if not call.is_known:
                self._held = call.mark + call.lead + call.text

    def _between(self, *, is_over: bool) -> Iterator[Part]:
        """Behind a call: its end, and perhaps another one."""
        format_ = self._format
        assert format_ is not None
        seen = self._held.lstrip(_BLANK)
        marks = [mark for mark in (format_.end, format_.separator) if mark]
        if format_.is_list:
            marks = [",", "]"]
        for mark in marks:
            if seen.startswith(mark):
                self._held = seen[len(mark) :]
                if mark == "," or (format_.separator and mark == format_.separator):
                    self._begin(mark)
                elif not format_.is_list or mark == "]":
                    self._state = self._content
                return iter(())
        if is_over or not any(mark.startswith(seen) for mark in marks):
            self._state = self._content
        return iter(())

    @property
    def _is_bare(self) -> bool:
        return self._format is not None and self._format.is_bare


class _Call:
    """One call while it comes."""

    def __init__(self, format_: ToolFormat, index: int) -> None:
        self.format = format_
        self.index = index
        self.mark = ""
        """The marker before it."""
        self.lead = ""
        """What stood between that and its text."""
        self.text = ""
        self.rest = ""
        """What came behind it."""
        self.is_known = False
        """Whether its name has been passed on."""
        self.is_done = False
        self.is_broken = False
        self._scan = _Scan()
        self._head = re.compile(
            r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
        )
        self._arguments: _Scan | None = None

    def push(self, text: str) -> list[Part]:
        """Take more of it and return what is known now."""
        parts: list[Part] = []
        start = len(self.text)
        used = self._scan.push(text)
        self.text += text[:used]
        self.rest = text[used:]
        if self.text and not self.text.startswith("{"):
            self.is_broken = True
            self.text += self.rest
            return parts
        fresh = self.text[start:]
        if not self.is_known and len(self.text) <= _MOST_HEAD + len(text):
            head = self._head.match(self.text)
            if head is not None:
                self.is_known = True
                parts.append(CallBegun(self.index, json.loads(head[1])))
                self._arguments = _Scan()
                fresh = self.text[head.end() :]
        if self._arguments is not None and not self._arguments.is_over:
            piece = fresh[: self._arguments.push(fresh)]
            if piece:
                parts.append(CallArguments(self.index, piece))
        if self._scan.is_over:
            self.is_done = True
            if not self.is_known:
                parts = self._whole()
        return parts

    def _whole(self) -> list[Part]:
        """Return a call that could not be passed on in pieces; nothing where it is none."""
        try:
            found = json.loads(self.text)
        except (ValueError, RecursionError):
            found = None
        name = found.get("name") if isinstance(found, dict) else None
        if not isinstance(name, str):
            self.is_done, self.is_broken = False, True
            self.text += self.rest
            return []
        assert isinstance(found, dict)
        arguments = found.get("arguments", found.get("parameters", {}))
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        self.is_known = True
        return [CallBegun(self.index, name), CallArguments(self.index, arguments)]


class _Scan:
    """Finds where a JSON object ends, in text that comes in pieces."""

    def __init__(self) -> None:
        self.is_over = False
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def push(self, text: str) -> int:
        """Return how many characters of `text` belong to the object."""
        if self.is_over:
            return 0
        for at, char in enumerate(text, start=1):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._in_string = False
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    self.is_over = True
                    return at
        return len(text)


def _safe(text: str, marks: Sequence[str], *, is_over: bool) -> tuple[str, str]:
    """Cut a text before what may become one of `marks`."""
    if is_over:
        return text, ""
    longest = max(map(len, marks))
    for at in range(max(0, len(text) - longest + 1), len(text)):
        if any(mark.startswith(text[at:]) for mark in marks):
            return text[:at], text[at:]
    return text, ""


def _merged(parts: list[Part]) -> list[Part]:
    """Return parts with neighbours of one kind put together."""
    merged: list[Part] = []
    for part in parts:
        last = merged[-1] if merged else None
        if isinstance(part, Content) and isinstance(last, Content):
            merged[-1] = Content(last.text + part.text)
        elif isinstance(part, Reasoning) and isinstance(last, Reasoning):
            merged[-1] = Reasoning(last.text + part.text)
        elif (
            isinstance(part, CallArguments)
            and isinstance(last, CallArguments)
            and part.index == last.index
        ):
            merged[-1] = CallArguments(part.index, last.text + part.text)
        else:
            merged.append(part)
    return merged
