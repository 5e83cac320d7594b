"""Conversations of programs, by the model's chat template.

Covers which tokens come next where part of a conversation is in a working set already. Does not cover
templates (`pie.tokens.template`).
"""

from __future__ import annotations

from pie.tokens.template import ChatTemplate
from pie.tokens.tokenizer import Tokenizer
from pie.wire.programs import Render
from pie.worker.programs.calls import MOST_TEXT_CHARS, bad


class Conversations:
    """Turns turns into tokens.

    Args:
        tokenizer: The model's.
        template: The model's; None where it has none.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self._tokenizer = tokenizer
        self._template = template

    def tokens(self, message: Render) -> list[int]:
        """Return the tokens of what is not known yet.

        Raises:
            CallError: The model has no template, or one that writes earlier turns anew.
            TokensError: The template does not take this conversation.
        """
        if self._template is None:
            raise bad(
                "this model has no chat template: encode a plain text and fill() its tokens instead"
            )
        chars = sum(len(turn.role) + len(turn.content) for turn in message.turns)
        if chars + len(message.known_answer or "") > MOST_TEXT_CHARS:
            raise bad(f"a conversation of more than {MOST_TEXT_CHARS} characters")
        turns = [{"role": turn.role, "content": turn.content} for turn in message.turns]
        full = self._template.render(turns, add_generation_prompt=message.opens_answer)
        known = turns[: message.known_turns]
        if not known:
            return self._tokenizer.encode(full)
        answer = message.known_answer
        before = self._template.render(known, add_generation_prompt=answer is not None)
        for text in ("",) if answer is None else (answer, answer.strip()):
            if full.startswith(before + text):
                return self._tokenizer.encode(full[len(before + text) :])
        raise bad(
            "this model's chat template writes earlier turns anew once others follow, so a conversation "
            "cannot go on in place: begin a new context with all turns"
        )
