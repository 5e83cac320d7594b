"""Remembered answers: exact text, separate spaces, bounded bytes."""

import sys
from array import array
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import given, strategies as st

from pie.router.memory import AnswerMemory, Said, Turn

ASKED = (Turn("system", "be brief"), Turn("user", "hi"))
RENDERED = "<system>be brief<user>hi<assistant>"
IDS = array("I", [1, 2, 3, 4])


@pytest.fixture
def memory() -> Iterator[AnswerMemory]:
    memory = AnswerMemory(10_000)
    yield memory
    memory.check()


def test_the_next_turn_finds_the_answers_ids(memory: AnswerMemory) -> None:
    memory.remember(Said(b"m", ASKED), "hello", RENDERED, IDS)
    turns = (*ASKED, Turn("assistant", "hello"), Turn("user", "more"))
    found = memory.recall(Said(b"m", turns), RENDERED + "hello<user>more<assistant>")
    assert found is not None
    assert found.ids == IDS
    assert found.chars == len(RENDERED + "hello")


def test_the_longest_beginning_wins(memory: AnswerMemory) -> None:
    memory.remember(Said(b"m", ASKED), "hello", RENDERED, IDS)
    turns = (*ASKED, Turn("assistant", "hello"), Turn("user", "more"))
    longer = RENDERED + "hello<user>more<assistant>"
    memory.remember(Said(b"m", turns), "yes", longer, array("I", range(9)))
    longest = (*turns, Turn("assistant", "yes"), Turn("user", "x"))
    found = memory.recall(Said(b"m", longest), longer + "yes<user>x")
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
    memory.remember(Said(b"m", ASKED), "hello", RENDERED, IDS)
    turns = (*ASKED, Turn("assistant", answer), Turn("user", "x"))
    assert memory.recall(Said(space, turns), rendered) is None


def test_turns_that_run_together_alike_differ(memory: AnswerMemory) -> None:
    memory.remember(Said(b"m", (Turn("user", "ab"),)), "c", "abc", IDS)
    turns = (Turn("user", "a"), Turn("assistant", "bc"))
    assert memory.recall(Said(b"m", turns), "abc") is None


def test_the_least_recently_used_goes_first() -> None:
    memory = AnswerMemory(3 * (400 + 16))
    for name in "abcd":
        memory.remember(Said(b"m", (Turn("user", name),)), "x", name, IDS)
        memory.check()
        memory.recall(Said(b"m", (Turn("user", "a"), Turn("assistant", "x"))), "ax")
    kept = [
        name
        for name in "abcd"
        if memory.recall(Said(b"m", (Turn("user", name), Turn("assistant", "x"))), name + "x")
    ]
    assert kept == ["a", "c", "d"]


def test_what_is_larger_than_the_budget_is_not_kept() -> None:
    memory = AnswerMemory(100)
    memory.remember(Said(b"m", ASKED), "hello", RENDERED, IDS)
    assert len(memory) == 0
    memory.check()


def test_the_same_conversation_is_kept_once(memory: AnswerMemory) -> None:
    for _ in range(3):
        memory.remember(Said(b"m", ASKED), "hello", RENDERED, IDS)
    assert len(memory) == 1


def test_a_longer_beginning_that_differs_leaves_the_shorter_one(memory: AnswerMemory) -> None:
    memory.remember(Said(b"m", ASKED), "hello", RENDERED, IDS)
    turns = (*ASKED, Turn("assistant", "hello"), Turn("user", "more"))
    memory.remember(
        Said(b"m", turns), "yes", RENDERED + "<thought>hello<user>more", array("I", range(9))
    )
    found = memory.recall(
        Said(b"m", (*turns, Turn("assistant", "yes"))),
        RENDERED + "hello<user>more<assistant>yes" * 3,
    )
    assert found is not None
    assert found.ids == IDS


def test_what_is_let_go_of_while_it_is_looked_at_is_no_mistake(
    memory: AnswerMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.remember(Said(b"m", ASKED), "hello", RENDERED, IDS)

    def forgetting(said: Said, rendered: str, chars: int) -> bytes:
        """Hash as always, while another thread needs the room."""
        monkeypatch.undo()
        for number in range(50):
            memory.remember(Said(b"m", (Turn("user", str(number)),)), "x", str(number), IDS)
        return said.digest(rendered, chars)

    turns = (*ASKED, Turn("assistant", "hello"), Turn("user", "more"))
    monkeypatch.setattr(Said, "digest", forgetting)
    found = memory.recall(Said(b"m", turns), RENDERED + "hello<user>more")
    assert found is not None
    assert found.ids == IDS
    assert memory.recall(Said(b"m", turns), RENDERED + "hello<user>more") is None


_texts = st.text(alphabet="ab☃\ud800", max_size=5)
_turns = st.lists(st.builds(Turn, st.sampled_from(["user", "assistant"]), _texts), max_size=4)


@given(_turns, _texts)
def test_a_conversation_with_its_answer_is_named_as_one_that_has_it(
    turns: list[Turn], answer: str
) -> None:
    longer = Said(b"m", [*turns, Turn("assistant", answer)])
    assert Said(b"m", turns).with_answer(answer) == longer.keys[-1]
    assert list(longer.answers)[-1] == longer.keys[-1]


@given(st.lists(st.tuples(_texts, st.integers(0, 5)), min_size=1, max_size=8))
def test_a_text_is_hashed_alike_whatever_was_hashed_before_it(asked: list[tuple[str, int]]) -> None:
    said, text = Said(b"m", ()), ""
    for more, chars in asked:
        # Texts that go on, begin anew or are cut.
        text = more if chars == 0 else text + more
        expected = blake3(text[:chars].encode(errors="surrogatepass")).digest()
        assert said.digest(text, min(chars, len(text))) == expected


def test_threads_may_recall_and_remember_at_once() -> None:
    memory = AnswerMemory(20 * (400 + 16))

    def use(thread: int) -> None:
        for number in range(3000):
            turn = (Turn("user", str((number * (thread + 1)) % 60)),)
            memory.recall(Said(b"m", (*turn, Turn("assistant", "x"))), turn[0].text + "x")
            memory.remember(Said(b"m", turn), "x", turn[0].text, IDS)

    switch_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(3) as threads:
            list(threads.map(use, range(3)))
    finally:
        sys.setswitchinterval(switch_s)
    memory.check()


def test_entries_are_touched_under_the_lock_alone(memory: AnswerMemory) -> None:
    class Guarded(OrderedDict[bytes, Any]):
        def __getattribute__(self, name: str) -> Any:
            assert memory._lock.locked()
            return super().__getattribute__(name)

        def __setitem__(self, key: bytes, value: object) -> None:
            assert memory._lock.locked()
            super().__setitem__(key, value)

    plain, memory._entries = memory._entries, Guarded()
    for number in range(50):
        turns = (Turn("user", str(number)),)
        memory.remember(Said(b"m", turns), "x", str(number), IDS)
        assert memory.recall(Said(b"m", (*turns, Turn("assistant", "x"))), f"{number}x") is not None
    memory._entries = plain
    memory.used_bytes = 0
