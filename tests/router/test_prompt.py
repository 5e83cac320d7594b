"""Prompts: remembered answers are kept apart, and what takes long is left to threads."""

from __future__ import annotations

import asyncio
import sys
import threading
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pie.router.memory import AnswerMemory, Turn
from pie.router.prompt import Conversation, Prompt, PromptMaker
from pie.router.turns import Turns
from pie.tokens.detokenizer import Detokenizer
from pie.tokens.pieces import PieceMemory
from pie.tokens.template import ChatTemplate
from pie.tokens.tokenizer import Tokenizer

ROOM = 100_000


@pytest.fixture
def memory() -> Iterator[AnswerMemory]:
    memory = AnswerMemory(2**20)
    yield memory
    memory.check()


@pytest.fixture
def maker(chat_folder: Path, memory: AnswerMemory) -> Iterator[PromptMaker]:
    with ThreadPoolExecutor(2) as threads:
        yield PromptMaker(
            Tokenizer.load(chat_folder),
            ChatTemplate.load(chat_folder),
            memory=memory,
            pieces=PieceMemory(2**20),
            thread_bytes=2000,
            turns=Turns(threads, at_once=2, most_waiting=100),
        )


class Talk:
    """One conversation whose answers are spelled as no tokenizer would: byte by byte."""

    def __init__(self, maker: PromptMaker, begin: str) -> None:
        self.maker = maker
        self.turns: tuple[Turn, ...] = (Turn("user", begin),)
        ids = range(maker.tokenizer.vocab_size)
        self.bytes = {maker.tokenizer.token_bytes(id_): id_ for id_ in ids}

    async def prompt(self, model: str = "m", salt: str | None = None) -> Prompt:
        messages = [{"role": turn.role, "content": turn.text} for turn in self.turns]
        return await self.maker.conversation(
            Conversation(messages, self.turns), model=model, salt=salt, context_tokens=ROOM
        )

    async def answer(self, text: str, model: str = "m", salt: str | None = None) -> array[int]:
        """Remember an answer, ask on, and return all ids up to the end of the answer."""
        prompt = await self.prompt(model, salt)
        ids = array("I", [self.bytes[bytes([byte])] for byte in text.encode()])
        await self.maker.remember(prompt, text, ids)
        self.turns += (Turn("assistant", text), Turn("user", "and then?"))
        return prompt.ids + ids


@pytest.mark.parametrize(
    ("model", "salt", "known"),
    [
        ("m", None, True),
        ("other", None, False),
        ("m", "tenant", False),
        ("m/tenant", None, False),
    ],
)
async def test_an_answer_is_known_to_its_own_model_and_salt_alone(
    maker: PromptMaker, model: str, salt: str | None, known: bool
) -> None:
    talk = Talk(maker, "hello")
    ids = await talk.answer("the quick fox")
    prompt = await talk.prompt(model, salt)
    assert (prompt.ids[: len(ids)] == ids) is known


async def test_a_name_and_a_salt_do_not_run_together(maker: PromptMaker) -> None:
    talk = Talk(maker, "hello")
    ids = await talk.answer("the quick fox", "m", "tenant")
    assert (await talk.prompt("m", "tenant")).ids[: len(ids)] == ids
    assert (await talk.prompt("m/tenant", None)).ids[: len(ids)] != ids


@pytest.mark.parametrize("more", ["", "!", "😀 and more"])
async def test_of_an_answer_that_a_stop_string_cut_the_ids_before_it_are_known(
    maker: PromptMaker, more: str
) -> None:
    text = "naïve — “x” 😀."
    for end in range(1, len(text) + 1):
        talk = Talk(maker, f"Say {end}{more}")
        prompt = await talk.prompt()
        ids = array("I", [talk.bytes[bytes([byte])] for byte in (text + more).encode()])
        await maker.remember(prompt, text[:end], ids)
        talk.turns += (Turn("assistant", text[:end]), Turn("user", "and then?"))
        known = prompt.ids + ids[: len(text[:end].encode())]
        assert (await talk.prompt()).ids[: len(known)] == known


async def test_ids_that_spell_another_text_are_not_remembered(
    maker: PromptMaker, memory: AnswerMemory
) -> None:
    talk = Talk(maker, "Say")
    prompt = await talk.prompt()
    ids = array("I", [talk.bytes[bytes([byte])] for byte in b"yes"])
    for text in ("yet", "yes!", "yEs", "ye\ufffd"):
        await maker.remember(prompt, text, ids)
    assert len(memory) == 0


async def test_long_conversations_go_on_while_other_answers_are_remembered(
    maker: PromptMaker, memory: AnswerMemory
) -> None:
    memory.budget_bytes = 40_000
    long = Talk(maker, "a long question " * 200)
    ids = await long.answer("the quick fox")
    switch_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        asked = [asyncio.ensure_future(long.prompt()) for _ in range(20)]
        for number in range(300):
            await Talk(maker, f"question {number}").answer("yes")
            await asyncio.sleep(0)
        prompts = await asyncio.gather(*asked)
    finally:
        sys.setswitchinterval(switch_s)
    assert any(prompt.ids[: len(ids)] == ids for prompt in prompts)


async def test_a_long_answer_is_turned_to_text_beside_the_event_loop(
    maker: PromptMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[int] = set()
    push = Detokenizer.push

    def watched(self: Detokenizer, ids: list[int]) -> str:
        seen.add(threading.get_ident())
        return push(self, ids)

    monkeypatch.setattr(Detokenizer, "push", watched)
    talk = Talk(maker, "hello")
    ids = await talk.answer("the quick fox " * 500)
    assert seen
    assert threading.get_ident() not in seen
    assert (await talk.prompt()).ids[: len(ids)] == ids


LONG = "a long text " * 200


@pytest.mark.parametrize(
    "asked",
    [
        Conversation([{"role": "user", "content": LONG}], (Turn("user", LONG),)),
        Conversation(
            [{"role": "assistant", "content": "a", "reasoning_content": LONG}],
            (Turn("assistant", "a"),),
        ),
        Conversation(
            [{"role": "user", "content": "a"}],
            (Turn("user", "a"),),
            tools=[{"type": "function", "function": {"name": "f", "description": LONG}}],
        ),
        Conversation(
            [{"role": "user", "content": "a"}],
            (Turn("user", "a"),),
            variables={"deep": [{"deeper": [LONG]}]},
        ),
        Conversation(
            [{"role": "user", "content": "a"}], (Turn("user", "a"),), variables={"many": [1] * 300}
        ),
    ],
    ids=["content", "reasoning", "tool", "variable", "values"],
)
async def test_a_template_that_is_given_much_is_rendered_beside_the_event_loop(
    maker: PromptMaker, monkeypatch: pytest.MonkeyPatch, asked: Conversation
) -> None:
    seen = _threads_of(monkeypatch, ChatTemplate, "render")
    short = Conversation([{"role": "user", "content": "hi"}], (Turn("user", "hi"),))
    await maker.conversation(short, model="m", salt=None, context_tokens=ROOM)
    assert seen == {threading.get_ident()}
    seen.clear()
    await maker.conversation(asked, model="m", salt=None, context_tokens=ROOM)
    assert seen
    assert threading.get_ident() not in seen


async def test_many_bad_words_are_read_beside_the_event_loop(
    maker: PromptMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = _threads_of(monkeypatch, Tokenizer, "encode")
    assert await maker.bad_words(["fox"])
    assert seen == {threading.get_ident()}
    seen.clear()
    assert await maker.bad_words([LONG, LONG])
    assert seen
    assert threading.get_ident() not in seen


def _threads_of(monkeypatch: pytest.MonkeyPatch, kind: type, name: str) -> set[int]:
    """Return a set of the threads that call a method from now on."""
    seen: set[int] = set()
    method = getattr(kind, name)

    def watched(*args: object, **more: object) -> object:
        seen.add(threading.get_ident())
        return method(*args, **more)

    monkeypatch.setattr(kind, name, watched)
    return seen
