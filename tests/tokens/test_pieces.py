"""A text whose parts are remembered is tokenised as it is as a whole."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given, settings, strategies as st
from tokenizers import AddedToken, Tokenizer as Inner, pre_tokenizers

from pie.tokens.pieces import PieceEncoder, PieceMemory, sure_cuts
from pie.tokens.tokenizer import Tokenizer
from tests.tokens import folders
from tests.tokens.conftest import KINDS

AWKWARD = (
    AddedToken("<mask>", lstrip=True, special=True, normalized=False),
    AddedToken("<right>", rstrip=True, special=True, normalized=False),
    AddedToken("word", single_word=True, normalized=False),
    AddedToken("[a]", special=True, normalized=False),
    AddedToken("x[", special=True, normalized=False),
    AddedToken("[b]", special=True, normalized=False),
    AddedToken("[b]]", special=True, normalized=False),
    AddedToken("<plain>", normalized=True),
    AddedToken("<cut>", special=True, normalized=False),
    AddedToken(" <blank>", special=True, normalized=False),
    AddedToken("_under_", special=True, normalized=False),
)
SPELT = [
    *(token.content for token in AWKWARD),
    *("<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>", "<tool>", "<|endoftext|>"),
]
PARTS = [
    *SPELT,
    *(text[:-1] for text in SPELT),
    *(" ", "  ", "\n", "\t", "\u200d", "a", "word", "words", "The cat", "naïve 😀", ">", "<", "]"),
    *folders.TEXTS,
]
TEXT = st.one_of(
    st.lists(st.sampled_from(PARTS), max_size=12).map("".join),
    st.lists(st.one_of(st.sampled_from(SPELT), st.text(max_size=6)), max_size=8).map("".join),
)


@pytest.fixture(scope="session")
def awkward(tmp_path_factory: pytest.TempPathFactory, folder_of: Callable[[str], Path]) -> Path:
    """A tokenizer whose added tokens take blanks along, stand apart from words or hide others."""
    folder = tmp_path_factory.mktemp("awkward")
    inner = Inner.from_file(str(folder_of("byte_level") / "tokenizer.json"))
    for token in AWKWARD:
        inner.add_tokens([token])
    inner.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


@pytest.fixture(scope="session", params=[*KINDS, "awkward", "split", "first"])
def tokenizer(
    request: pytest.FixtureRequest,
    folder_of: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Tokenizer:
    if request.param in KINDS:
        return Tokenizer.load(folder_of(request.param))
    folder = tmp_path_factory.mktemp(request.param)
    config = '{"split_special_tokens": true}' if request.param == "split" else "{}"
    if request.param == "first":
        # A blank is put before the first word of a text, but not before one after a special token.
        inner = Inner.from_file(str(folder_of("unigram") / "tokenizer.json"))
        inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    else:
        inner = Inner.from_file(str(request.getfixturevalue("awkward") / "tokenizer.json"))
    inner.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(config)
    return Tokenizer.load(folder)


@settings(max_examples=80)
@example(texts=["x<cut>", "x[a]"], budget=2**20)
@example(texts=["<s>The cat", "The cat<s>The cat"], budget=2**20)
@given(texts=st.lists(TEXT, min_size=1, max_size=4), budget=st.sampled_from([0, 2_000, 2**20]))
def test_any_text_becomes_the_ids_that_it_has_as_a_whole(
    tokenizer: Tokenizer, texts: list[str], budget: int
) -> None:
    memory = PieceMemory(budget)
    encoder = PieceEncoder(tokenizer, SPELT, memory)
    for text in (*texts, "".join(texts), *texts):
        assert encoder.encode(b"", text, tokenizer.encode).tolist() == tokenizer.encode(text)
        memory.check()


def test_what_is_no_sure_cut_is_left_out(awkward: Path) -> None:
    cuts = sure_cuts(Tokenizer.load(awkward), SPELT)
    assert cuts.keys() == {"<cut>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"}


def test_a_part_is_tokenised_once_and_only_where_it_is_new(smollm2: Path) -> None:
    tokenizer = Tokenizer.load(smollm2)
    encoder = PieceEncoder(tokenizer, SPELT, PieceMemory(2**20))
    seen: list[str] = []

    def encode(text: str) -> list[int]:
        seen.append(text)
        return tokenizer.encode(text)

    def turn(role: str, text: str) -> str:
        return f"<|im_start|>{role}\n{text}<|im_end|>"

    first = turn("system", "Be kind.") + turn("user", "Hello")
    encoder.encode(b"", first, encode)
    encoder.encode(b"", first, encode)
    assert seen == [first]
    then = first + turn("assistant", "Hi.") + turn("user", "Why?")
    encoder.encode(b"", then, encode)
    assert len(seen) == 2
    assert seen[1].startswith("<|im_start|>assistant\nHi.")
    # Another tenant cannot tell from the time that somebody has sent this.
    encoder.encode(b"other", first, encode)
    assert seen[2:] == [first]


def test_the_least_recently_used_is_forgotten_and_the_budget_kept() -> None:
    memory = PieceMemory(3_000)
    keys = [(b"", False, f"part {number}") for number in range(8)]
    for key in keys:
        memory.put([(key, array("I", range(100)))])
        memory.get([keys[0]])
        memory.check()
    assert len(memory) == 3
    found = [ids is not None for ids in memory.get(keys)]
    assert found == [True, *[False] * 5, True, True]
    memory.put([((b"", False, "long"), array("I", range(1000)))])
    assert len(memory) == 3
