"""What a worker says after its attempt has ended goes nowhere."""

from array import array
from pathlib import Path

import pytest

from pie.router.generation import Ending, Generation, Order
from pie.router.mailbox import Mailbox
from pie.router.memory import AnswerMemory
from pie.router.models import ServedModel
from pie.router.prefix import Prefix
from pie.router.prompt import Prompt, PromptMaker
from pie.tokens.pieces import PieceMemory
from pie.tokens.tokenizer import Tokenizer
from pie.wire.messages import FinishReason, RefusalCode, Refused, Sampling, TokenDelta

IDS = array("I", [1, 2, 3])


@pytest.fixture(scope="module")
def model(chat_folder: Path) -> ServedModel:
    tokenizer = Tokenizer.load(chat_folder)
    prompts = PromptMaker(
        tokenizer,
        None,
        memory=AnswerMemory(0),
        pieces=PieceMemory(0),
        thread_bytes=0,
        turns=None,  # type: ignore[arg-type]
    )
    return ServedModel("m", tokenizer.digest, prompts, 100, 100, 0)


@pytest.fixture
def generation(model: ServedModel) -> Generation:
    order = Order(model, Prompt(IDS), Prefix(IDS), 10, Sampling())
    return Generation("r", 0, order, Mailbox(1, streaming=True))


@pytest.mark.parametrize("ending", [Ending.SILENT, Ending.LATE])
async def test_tokens_of_an_attempt_that_was_given_up_are_not_taken(
    generation: Generation, ending: Ending
) -> None:
    ended = generation.next_attempt()
    generation.on_delta(TokenDelta("r.1", (7,), "one"))
    ended.set_result(ending)
    generation.on_delta(TokenDelta("r.1", (8,), " two", FinishReason.STOP))
    generation.on_delta(TokenDelta("r.1", (9,), "", FinishReason.FAILED, error="no"))
    generation.on_refused(Refused("r.1", RefusalCode.FAILED, "no"))
    assert generation.output_ids == array("I", [7])
    assert generation.text == "one"
    assert (generation.finish, generation.refused, generation.failure) == (None, None, "")
    assert not generation.mailbox.ended
    # The next worker goes on where the client is.
    assert generation.prefix.ids == IDS + array("I", [7])
    ended = generation.next_attempt()
    generation.on_delta(TokenDelta("r.2", (8,), " two", FinishReason.STOP))
    assert generation.text == "one two"
    assert ended.result() is Ending.DONE
    assert generation.mailbox.ended


async def test_a_sequence_ends_once(generation: Generation) -> None:
    generation.next_attempt()
    for _ in range(2):
        generation.on_delta(TokenDelta("r.1", (8,), "two", FinishReason.STOP))
    assert generation.text == "two"
    assert generation.mailbox.ended
