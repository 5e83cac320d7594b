"""Answers that match a grammar: which tokens may come next.

Covers compiling grammars, off the step thread, and one sequence's state in one. Does not cover how
grammars come about (`pie.router.api.structured`), how they are written for llguidance (`pie.worker.grammar_text`),
that they are tried in another process before (`pie.worker.grammar_trial`) or how masks enter a draw
(`pie.worker.sampling`).

The state after any tokens is a function of the grammar and those tokens, so that another worker goes
on where one left off by taking them in anew.
"""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence

import llguidance
import numpy as np
import torch

from pie.tokens.tokenizer import Tokenizer
from pie.wire.errors import RefusedError
from pie.wire.messages import Grammar, RefusalCode
from pie.worker.grammar_process import STACK_BYTES, Setup, make_tokenizer
from pie.worker.grammar_text import BadGrammarError, beginning, on_deep_stack
from pie.worker.grammar_trial import GrammarTrial

_MOST_COMPILED = 64
"""Grammars kept ready: applications ask with the same few again and again."""
_MOST_TEXT_COMPILED = 4 << 20
"""Characters of all compiled grammars, those in use included; a large one takes 400 bytes for each."""
_MOST_WRONG = 256
"""Grammars known to be wrong, by their digests."""


class GrammarFailedError(Exception):
    """A sequence has left its grammar, or the grammar is too much work; the text says which."""


class _Origin:
    """What all states of one compiled grammar share: while it is there, that takes memory."""


class Constraint:
    """One sequence's state in a grammar. Belongs to the step thread once it is submitted."""

    def __init__(
        self, matcher: llguidance.LLMatcher, vocab_size: int, origin: _Origin | None = None
    ) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self.origin = origin or _Origin()

    def fresh(self) -> Constraint:
        """Return another one with a state of its own, the same as this one's now."""
        return Constraint(self._matcher.deep_copy(), self._vocab_size, self.origin)

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
            # Not in llguidance's words, which repeat what was generated: this is told and logged.
            if "TooComplex" in str(self._matcher.stop_reason()):
                raise GrammarFailedError("the grammar is too much work")
            raise GrammarFailedError("the answer has left its grammar")


class GrammarCompiler:
    """Compiles grammars for one model. Safe to use from several threads; each call may take seconds.

    What a grammar does to the process that compiles it is found out in another one, once for each.

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
        self._trial: GrammarTrial | None = None
        self._compiled: OrderedDict[Grammar, Constraint] = OrderedDict()
        self._sizes: weakref.WeakKeyDictionary[_Origin, int] = weakref.WeakKeyDictionary()
        self._wrong: OrderedDict[bytes, str] = OrderedDict()
        self._known = threading.Lock()
        """Held for moments; the other one while a grammar is compiled."""
        self._compiling = threading.Lock()

    def ready(self, grammar: Grammar) -> Constraint | None:
        """Return the beginning of a grammar that is compiled already, at once.

        Raises:
            RefusedError: It is known to be wrong.
        """
        with self._known:
            if (reason := self._wrong.get(_digest(grammar))) is not None:
                raise _bad(reason)
            found = self._compiled.get(grammar)
            if found is None:
                return None
            self._compiled.move_to_end(grammar)
            return found.fresh()

    def compile(self, grammar: Grammar) -> Constraint:
        """Return the beginning of a grammar.

        Raises:
            RefusedError: `BAD_GRAMMAR` and what is wrong with it, `OVERLOADED` where too many are in use, or
                `FAILED` where it cannot be tried.
        """
        with self._compiling:
            if (found := self.ready(grammar)) is None:
                self._make_room(len(grammar.text))
                found = self._compile(grammar)
                with self._known:
                    self._compiled[grammar] = found
                    self._sizes[found.origin] = len(grammar.text)
            return found.fresh()

    def close(self) -> None:
        """End the process that tries grammars; from any thread."""
        if self._trial is not None:
            self._trial.close()

    def _make_room(self, chars: int) -> None:
        """Forget grammars that were not used for longest, as far as that helps.

        Raises:
            RefusedError: Those in use leave no room.
        """
        with self._known:
            while self._compiled and (
                len(self._compiled) >= _MOST_COMPILED
                or sum(self._sizes.values()) + chars > _MOST_TEXT_COMPILED
            ):
                self._compiled.popitem(last=False)
            if sum(self._sizes.values()) + chars > _MOST_TEXT_COMPILED:
                raise RefusedError(
                    RefusalCode.OVERLOADED, "too many large grammars are in use", 1.0
                )

    def _compile(self, grammar: Grammar) -> Constraint:
        try:
            return self._constraint(grammar)
        except BadGrammarError as error:
            with self._known:
                self._wrong[_digest(grammar)] = str(error)
                if len(self._wrong) > _MOST_WRONG:
                    self._wrong.popitem(last=False)
            raise _bad(str(error)) from error
        except OSError as error:
            raise RefusedError(RefusalCode.FAILED, f"a grammar cannot be tried: {error}") from error

    def _constraint(self, grammar: Grammar) -> Constraint:
        self._try(grammar)
        guided = self._guided
        assert guided is not None
        matcher = on_deep_stack(lambda: beginning(guided, grammar), 2 * STACK_BYTES)
        constraint = Constraint(matcher, self._vocab_size)
        if constraint.allowed() is None:
            raise BadGrammarError("the model has no token to begin it with")
        return constraint

    def _try(self, grammar: Grammar) -> None:
        if not self._eos_token_ids:
            raise BadGrammarError("the model has no token that ends an answer")
        if self._trial is None or self._guided is None:
            # Takes a second for 49,152 tokens, there and here, and only models that are asked for it need it.
            setup = Setup(
                self._tokenizer.as_json(),
                max(self._vocab_size, self._tokenizer.vocab_size),
                tuple(self._eos_token_ids),
            )
            self._trial = self._trial or GrammarTrial(setup)
            self._trial.start()
            self._guided = make_tokenizer(setup)
        verdict = self._trial.verdict(grammar)
        if verdict.reason and not verdict.is_final:
            raise _bad(verdict.reason)
        if verdict.reason:
            raise BadGrammarError(verdict.reason)


def _digest(grammar: Grammar) -> bytes:
    text = f"{grammar.kind} {grammar.text}".encode(errors="surrogatepass")
    return hashlib.blake2b(text, digest_size=16).digest()


def _bad(reason: str) -> RefusedError:
    return RefusedError(RefusalCode.BAD_GRAMMAR, reason)
