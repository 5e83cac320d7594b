"""Answers that match a grammar: which tokens may come next.

Covers compiling grammars, off the step thread, and one sequence's state in one. Does not cover how
grammars come about (`pie.router.api.structured`) or how masks enter a draw (`pie.worker.sampling`).

The state after any tokens is a function of the grammar and those tokens, so that another worker goes
on where one left off by taking them in anew. Home of llguidance.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence

import llguidance
import numpy as np
import torch

from pie.tokens.tokenizer import Tokenizer
from pie.wire.errors import RefusedError
from pie.wire.messages import Grammar, GrammarKind, RefusalCode

_MOST_TEXT = 512 * 1024
_MOST_COMPILED = 64
"""Grammars kept ready: applications ask with the same few again and again."""
_MOST_REASON = 300
_WHITESPACE = r"[ \t\n]{0,20}"
"""Between the parts of a JSON text. Without a bound a small model may write blanks for ever."""


class GrammarFailedError(Exception):
    """A sequence has left its grammar, or the grammar is too much work; the text says which."""


class Constraint:
    """One sequence's state in a grammar. Belongs to the step thread once it is submitted."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def fresh(self) -> Constraint:
        """Return another one with a state of its own, the same as this one's now."""
        return Constraint(self._matcher.deep_copy(), self._vocab_size)

    def allowed(self) -> torch.Tensor | None:
        """Return which tokens may come next, bool `[vocab]`.

        None where the grammar failed, or where only tokens could come that the model does not have.
        """
        bits = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            return None
        words = np.frombuffer(bits, dtype=np.uint8)
        mask = np.unpackbits(words, count=self._vocab_size, bitorder="little").view(np.bool_)
        return torch.from_numpy(mask) if mask.any() else None

    def take(self, tokens: Sequence[int]) -> None:
        """Learn which tokens have come.

        Raises:
            GrammarFailedError: They do not fit, or the grammar is too much work.
        """
        if not self._matcher.consume_tokens(list(tokens)):
            raise GrammarFailedError(_short(self._matcher.get_error()))


class GrammarCompiler:
    """Compiles grammars for one model. Safe to use from several threads; each call may take a second.

    Args:
        tokenizer: The model's.
        vocab_size: Logits of the model.
        eos_token_ids: What ends an answer.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = [token for token in eos_token_ids if token < vocab_size]
        self._guided: llguidance.LLTokenizer | None = None
        self._compiled: OrderedDict[Grammar, Constraint] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, grammar: Grammar) -> Constraint:
        """Return the beginning of a grammar.

        Raises:
            RefusedError: `BAD_GRAMMAR` and what is wrong with it.
        """
        with self._lock:
            found = self._compiled.get(grammar)
            if found is None:
                found = self._compiled[grammar] = self._compile(grammar)
                if len(self._compiled) > _MOST_COMPILED:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(grammar)
            return found.fresh()

    def _compile(self, grammar: Grammar) -> Constraint:
        if len(grammar.text) > _MOST_TEXT:
            raise _bad(f"more than {_MOST_TEXT:,} characters")
        if not self._eos_token_ids:
            raise _bad("the model has no token that ends an answer")
        if self._guided is None:
            # Takes a second for 49,152 tokens, and only models that are asked for it need it.
            self._guided = llguidance.LLTokenizer(
                self._tokenizer.as_json(),
                max(self._vocab_size, self._tokenizer.vocab_size),
                eos_token=self._eos_token_ids,
            )
        try:
            text = _spelled(grammar)
        except ValueError as error:
            raise _bad(str(error)) from error
        matcher = llguidance.LLMatcher(self._guided, text, log_level=0)
        if matcher.is_error():
            raise _bad(matcher.get_error())
        constraint = Constraint(matcher, self._vocab_size)
        if constraint.allowed() is None:
            raise _bad(matcher.get_error() or "the model has no token to begin it with")
        return constraint


def _spelled(grammar: Grammar) -> str:
    """Return a grammar as llguidance reads it.

    Raises:
        ValueError: It is not what its kind says.
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
            choices = json.loads(grammar.text)
            # A JSON string is a Lark string.
            spelled = " | ".join(json.dumps(str(choice)) for choice in choices)
            return matcher.grammar_from_lark(f"start: {spelled}")
        case GrammarKind.LARK:
            return matcher.grammar_from_lark(grammar.text)


def _short(reason: str) -> str:
    """Return a reason in one line; llguidance draws where it is, in several."""
    words = " ".join(reason.split())
    return words if len(words) <= _MOST_REASON else f"{words[:_MOST_REASON]}…"


def _bad(reason: str) -> RefusedError:
    return RefusedError(RefusalCode.BAD_GRAMMAR, _short(reason))
