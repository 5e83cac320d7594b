"""Remembered answers: exact text, separate spaces, bounded bytes."""

from array import array
from collections.abc import Iterator

import pytest

from pie.router.memory import AnswerMemory, Turn

ASKED = (Turn("system", "be brief"), Turn("user", "hi"))
RENDERED = "<system>be brief<user>hi<assistant>"
IDS = array("I", [1, 2, 3, 4])


@pytest.fixture
def memory() -> Iterator[AnswerMemory]:
    memory = AnswerMemory(10_000)
    yield memory
    memory.check()


def test_the_next_turn_finds_the_answers_ids(memory: AnswerMemory) -> None:
    memory.remember(b"m", ASKED, "hello", RENDERED, IDS)
    turns = (*ASKED, Turn("assistant", "hello"), Turn("user", "more"))
    found = memory.recall(b"m", turns, RENDERED + "hello<user>more<assistant>")
    assert found is not None
    assert found.ids == IDS
    assert found.chars == len(RENDERED + "hello")


def test_the_longest_beginning_wins(memory: AnswerMemory) -> None:
    memory.remember(b"m", ASKED, "hello", RENDERED, IDS)
    turns = (*ASKED, Turn("assistant", "hello"), Turn("user", "more"))
    longer = RENDERED + "hello<user>more<assistant>"
    memory.remember(b"m", turns, "yes", longer, array("I", range(9)))
    found = memory.recall(
        b"m", (*turns, Turn("assistant", "yes"), Turn("user", "x")), longer + "yes<user>x"
    )
    assert found is not None
    assert len(found.ids) == 9


@pytest.mark.parametrize(
    ("space", "answer", "rendered"),
    [
        (b"other", "hello", RENDERED + "hello<user>"),
        (b"m", "hello ", RENDERED + "hello <user>"),
        (b"m", "hello", "<other>" + RENDERED + "hello<user>"),
        (b"m", "hello", RENDERED + "hell"),
    ],
)
def test_other_spaces_and_texts_find_nothing(
    memory: AnswerMemory, space: bytes, answer: str, rendered: str
) -> None:
    memory.remember(b"m", ASKED, "hello", RENDERED, IDS)
    turns = (*ASKED, Turn("assistant", answer), Turn("user", "x"))
    assert memory.recall(space, turns, rendered) is None


def test_turns_that_run_together_alike_differ(memory: AnswerMemory) -> None:
    memory.remember(b"m", (Turn("user", "ab"),), "c", "abc", IDS)
    turns = (Turn("user", "a"), Turn("assistant", "bc"))
    assert memory.recall(b"m", turns, "abc") is None


def test_the_least_recently_used_goes_first() -> None:
    memory = AnswerMemory(3 * (400 + 16))
    for name in "abcd":
        memory.remember(b"m", (Turn("user", name),), "x", name, IDS)
        memory.check()
        memory.recall(b"m", (Turn("user", "a"), Turn("assistant", "x")), "ax")
    kept = [
        name
        for name in "abcd"
        if memory.recall(b"m", (Turn("user", name), Turn("assistant", "x")), name + "x")
    ]
    assert kept == ["a", "c", "d"]


def test_what_is_larger_than_the_budget_is_not_kept() -> None:
    memory = AnswerMemory(100)
    memory.remember(b"m", ASKED, "hello", RENDERED, IDS)
    assert len(memory) == 0
    memory.check()


def test_the_same_conversation_is_kept_once(memory: AnswerMemory) -> None:
    for _ in range(3):
        memory.remember(b"m", ASKED, "hello", RENDERED, IDS)
    assert len(memory) == 1
