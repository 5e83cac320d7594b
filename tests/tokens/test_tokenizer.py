from __future__ import annotations

import json
import pickle
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st
from transformers import PreTrainedTokenizerFast

from pie.tokens.errors import TextError, TokenizerError
from pie.tokens.tokenizer import Tokenizer
from tests.tokens import folders
from tests.tokens.conftest import Pair

TEXTS = [
    "",
    " ",
    "  two leading spaces",
    "<|im_start|>user\nHello<|im_end|>\n",
    "a</s>b <s> c<s></s>",
    "<tool>né｜▁｜ naïve",
    "\ufffd\u0000\u200d\u00a0",
    *folders.TEXTS,
]


@pytest.mark.parametrize("add_special_tokens", [False, True])
def test_text_becomes_the_ids_that_transformers_gives(pair: Pair, add_special_tokens: bool) -> None:
    for text in TEXTS:
        wanted = pair.theirs.encode(text, add_special_tokens=add_special_tokens)
        assert pair.ours.encode(text, add_special_tokens=add_special_tokens) == wanted


@pytest.mark.parametrize("skip_special_tokens", [False, True])
def test_ids_become_the_text_that_transformers_gives(pair: Pair, skip_special_tokens: bool) -> None:
    for text in TEXTS:
        ids = pair.theirs.encode(text)
        wanted = pair.theirs.decode(ids, skip_special_tokens=skip_special_tokens)
        assert pair.ours.decode(ids, skip_special_tokens=skip_special_tokens) == wanted


@settings(max_examples=30)
@given(text=st.text(max_size=60))
def test_any_text_becomes_the_ids_that_transformers_gives(pair: Pair, text: str) -> None:
    assert pair.ours.encode(text) == pair.theirs.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("kind", ["smollm2", "byte_level", "gemma"])
def test_the_bytes_of_tokens_together_are_the_text(pairs: Callable[[str], Pair], kind: str) -> None:
    tokenizer = pairs(kind).ours
    for text in folders.TEXTS:
        ids = tokenizer.encode(text)
        assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


def test_the_bytes_of_a_token_are_those_it_adds_within_a_text(
    pairs: Callable[[str], Pair],
) -> None:
    llama, word_piece = pairs("llama").ours, pairs("word_piece").ours
    spelt = {"▁the": b" the", "<0xE4>": b"\xe4", "<s>": b"<s>"}
    for token, raw in spelt.items():
        id_ = llama.token_id(token)
        assert id_ is not None
        assert llama.token_bytes(id_) == raw
    inner = next(i for i in range(word_piece.vocab_size) if str(word_piece.token(i))[:2] == "##")
    assert word_piece.token_bytes(inner) == str(word_piece.token(inner))[2:].encode()
    word = word_piece.token_id("The")
    assert word is not None
    assert word_piece.token_bytes(word) == b" The"


def test_an_id_that_the_vocabulary_lacks_adds_nothing(pair: Pair) -> None:
    beyond = pair.ours.vocab_size
    assert pair.ours.token(beyond) is None
    assert pair.ours.token(-1) is None
    assert pair.ours.token_bytes(beyond) == b""
    assert pair.ours.decode([beyond]) == ""


def test_size_and_special_ids_are_those_of_transformers(pair: Pair) -> None:
    assert pair.ours.vocab_size == len(pair.theirs)
    special = {i for i, t in pair.theirs.added_tokens_decoder.items() if t.special}
    assert pair.ours.special_ids == special


def test_half_of_a_surrogate_pair_is_refused_with_its_place(pair: Pair) -> None:
    with pytest.raises(TextError, match="character 2"):
        pair.ours.encode("ab\ud800")


def test_threads_get_the_same_ids_at_the_same_time(pairs: Callable[[str], Pair]) -> None:
    tokenizer = pairs("byte_level").ours
    wanted = [tokenizer.encode(text) for text in folders.TEXTS]
    wrong: list[list[int]] = []

    def work() -> None:
        for _ in range(50):
            for text, ids in zip(folders.TEXTS, wanted, strict=True):
                if (found := tokenizer.encode(text)) != ids:
                    wrong.append(found)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# --- what the configuration adds -------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return folders.write("byte_level", tmp_path / "model")


def configure(folder: Path, **values: object) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    "config",
    [
        {"eos_token": {"__type": "AddedToken", "content": "<end>", "lstrip": True}},
        {"additional_special_tokens": ["<a>", "<b>"]},
        {"extra_special_tokens": {"image_token": "<image>"}},
        {"image_token": "<image>"},
        {"added_tokens_decoder": {"999": {"content": "<late>", "special": True}}},
        {"eos_token": "the", "pad_token": "<tool>"},
        {"extra_special_tokens": ["<tool>"]},
        {"split_special_tokens": True},
        {"add_bos_token": True},
    ],
    ids=lambda config: next(iter(config)),
)
def test_tokens_that_the_configuration_adds_are_those_of_transformers(
    folder: Path, config: dict[str, object]
) -> None:
    configure(folder, **config)
    ours, theirs = Tokenizer.load(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    text = "a <end> b<a><b>c <image>the <late> <tool></s><|im_end|>"
    for special in (False, True):
        ids = theirs.encode(text, add_special_tokens=special)
        assert ours.encode(text, add_special_tokens=special) == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_an_older_special_tokens_map_is_read(folder: Path) -> None:
    (folder / "special_tokens_map.json").write_text('{"eos_token": {"content": "<fin>"}}')
    ours, theirs = Tokenizer.load(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    assert ours.encode("a<fin>") == theirs.encode("a<fin>")
    assert ours.eos_token_ids == (theirs.eos_token_id,)


def test_truncation_that_the_file_asks_for_is_left_out(folder: Path) -> None:
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["truncation"] = {
        "direction": "Right",
        "max_length": 2,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    path.write_text(json.dumps(content))
    assert len(Tokenizer.load(folder).encode("one two three four")) > 2


# --- ids that end an answer ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "ids"),
    [
        ({}, (1,)),
        ({"generation_config.json": {"eos_token_id": [7, 3]}}, (1, 3, 7)),
        (
            {"generation_config.json": {"eos_token_id": 5}, "config.json": {"eos_token_id": 6}},
            (1, 5),
        ),
        ({"generation_config.json": {}, "config.json": {"eos_token_id": 6}}, (1, 6)),
        ({"config.json": {"text_config": {"eos_token_id": 9}}}, (1, 9)),
    ],
)
def test_an_answer_ends_where_the_generation_configuration_or_the_tokenizer_says(
    folder: Path, files: dict[str, object], ids: tuple[int, ...]
) -> None:
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    assert Tokenizer.load(folder).eos_token_ids == ids


# --- the digest ------------------------------------------------------------------------------------


def test_the_digest_is_the_same_for_a_copy_elsewhere(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "elsewhere")
    configure(copy, name_or_path="/another/place", transformers_version="9.9")
    assert Tokenizer.load(copy).digest == Tokenizer.load(folder).digest


@pytest.mark.parametrize("change", ["template", "special", "vocabulary", "flag"])
def test_the_digest_changes_with_whatever_makes_tokens_or_text(folder: Path, change: str) -> None:
    before = Tokenizer.load(folder).digest
    if change == "template":
        (folder / "chat_template.jinja").write_text("{{ messages }}")
    elif change == "special":
        configure(folder, eos_token="<|im_end|>")
    elif change == "flag":
        configure(folder, clean_up_tokenization_spaces=True)
    else:
        path = folder / "tokenizer.json"
        content = json.loads(path.read_text())
        content["added_tokens"][-1]["content"] = "<other>"
        path.write_text(json.dumps(content))
    assert Tokenizer.load(folder).digest != before


# --- what is wrong with a folder -------------------------------------------------------------------


def test_a_folder_without_a_tokenizer_is_named_with_what_it_needs(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.load(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "tokenizer.json" in str(caught.value)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"There is no folder .*nowhere"):
        Tokenizer.load(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("tokenizer.json", b"{", "not a tokenizer that can be loaded"),
        ("tokenizer.json", b"{}", "not a tokenizer that can be loaded"),
        ("tokenizer.json", b"\xff", "can't decode"),
        ("tokenizer_config.json", b"{", "not valid JSON"),
        ("tokenizer_config.json", b"[]", "no JSON object"),
        ("tokenizer_config.json", b"\xff", "not UTF-8"),
        (
            "tokenizer_config.json",
            b'{"added_tokens_decoder": {"1": {"kontent": "x"}}}',
            "bad token",
        ),
        (
            "tokenizer_config.json",
            b'{"added_tokens_decoder": {"x": {"content": "x"}}}',
            "bad token",
        ),
        ("generation_config.json", b"no", "not valid JSON"),
    ],
)
def test_a_broken_file_is_named_with_what_is_wrong(
    folder: Path, name: str, content: bytes, says: str
) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(TokenizerError, match=says) as caught:
        Tokenizer.load(folder)
    assert str(folder / name) in str(caught.value)


def test_a_decoder_that_cannot_be_streamed_is_refused(folder: Path) -> None:
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["decoder"] = {
        "type": "CTC",
        "pad_token": "<s>",
        "word_delimiter_token": "|",
        "cleanup": True,
    }
    path.write_text(json.dumps(content))
    with pytest.raises(TokenizerError, match="CTC step, which Pie cannot stream"):
        Tokenizer.load(folder)


def test_errors_survive_pickling() -> None:
    error = pickle.loads(pickle.dumps(TokenizerError("no tokenizer")))
    assert isinstance(error, TokenizerError)
    assert str(error) == "no tokenizer"
