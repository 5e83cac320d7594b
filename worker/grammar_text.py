"""Grammars as llguidance reads them.

Covers how each kind is spelled, making its beginning, and reasons in one line. Does not cover what stands
between a bad grammar and the worker (`pie.worker.grammar_trial`) or a sequence's state
(`pie.worker.grammar`). Imports no torch: the process that tries grammars needs none.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Callable
from typing import TypeVar

import llguidance

from pie.wire.messages import Grammar, GrammarKind

MOST_TEXT = 512 * 1024
_MOST_REASON = 300
_WHITESPACE = r"[ \t\n]{0,20}"
"""Between the parts of a JSON text. Without a bound a small model may write blanks for ever."""
_STATE = re.compile(r"\s*<state>.*", re.DOTALL)
"""What llguidance adds of its own insides."""
_REASONS = {
    "NoExtension": "no text matches it",
    "NoExtensionBias": "no text matches it",
    "InternalError": "llguidance cannot compile it",
}

_stack_size = threading.Lock()

Result = TypeVar("Result")


class BadGrammarError(Exception):
    """A grammar is wrong; the text says how, in one line."""


def beginning(tokenizer: llguidance.LLTokenizer, grammar: Grammar) -> llguidance.LLMatcher:
    """Return a matcher at the beginning of a grammar that begins with a token.

    Deep grammars take a deep stack, without which the process dies: use `on_deep_stack`.

    Raises:
        BadGrammarError: It is wrong.
    """
    if len(grammar.text) > MOST_TEXT:
        raise BadGrammarError(f"more than {MOST_TEXT:,} characters")
    try:
        text = _spelled(grammar)
        matcher = llguidance.LLMatcher(tokenizer, text, log_level=0)
    except (ValueError, TypeError) as error:
        raise BadGrammarError(short(str(error))) from error
    if matcher.is_error():
        raise BadGrammarError(short(matcher.get_error()))
    bits = matcher.compute_bitmask()
    if matcher.is_error():
        raise BadGrammarError(short(matcher.get_error()))
    if not any(bits):
        raise BadGrammarError("the model has no token to begin it with")
    ends = sum(1 << token for token in set(tokenizer.eos_tokens))
    if not int.from_bytes(bits, "little") & ~ends:
        raise BadGrammarError("no text but the empty one matches it")
    return matcher


def on_deep_stack(work: Callable[[], Result], stack_bytes: int) -> Result:
    """Do something on a thread of its own with a stack of this size, and return or raise what it does."""
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            errors.append(error)

    thread = threading.Thread(target=run, name="pie-deep", daemon=True)
    with _stack_size:
        before = threading.stack_size(stack_bytes)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    if errors:
        raise errors.pop()
    return results.pop()


def short(reason: str) -> str:
    """Return a reason in one line; llguidance draws where it is, in several, and adds its state."""
    words = " ".join(_STATE.sub("", reason).split())
    words = _REASONS.get(words, words)
    return words if len(words) <= _MOST_REASON else f"{words[:_MOST_REASON]}…"


def _spelled(grammar: Grammar) -> str:
    """Return a grammar as llguidance reads it.

    Raises:
        BadGrammarError: It is not what its kind says.
        ValueError: The same, in llguidance's words.
    """
    matcher = llguidance.LLMatcher
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return matcher.grammar_from_json_schema(
                grammar.text, {"whitespace_pattern": _WHITESPACE}
            )
        case GrammarKind.REGEX:
            return matcher.grammar_from_regex(grammar.text)
        case GrammarKind.CHOICE:
            return matcher.grammar_from_lark(f"start: {_choices(grammar.text)}")
        case GrammarKind.LARK:
            return matcher.grammar_from_lark(grammar.text)


def _choices(text: str) -> str:
    choices: object = None
    with contextlib.suppress(ValueError, RecursionError):
        choices = json.loads(text)
    if not isinstance(choices, list) or not all(isinstance(one, str) for one in choices):
        raise BadGrammarError("choices are a JSON list of strings")
    if not choices:
        raise BadGrammarError("there is nothing to choose from")
    # A JSON string is a Lark string.
    return " | ".join(json.dumps(one) for one in choices)
