from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings, strategies as st

from pie.tokens import stages
from pie.tokens.cleanup import CleanUpStage, ReplaceText, clean_up
from pie.tokens.detokenizer import Detokenizer
from pie.tokens.tokenizer import Tokenizer
from tests.tokens import folders
from tests.tokens.conftest import Pair

REPLACEMENT = "\ufffd"


def stream(detokenizer: Detokenizer, ids: Sequence[int], cuts: Sequence[int] = ()) -> list[str]:
    """Push ids in pieces, one by one where there are no cuts, and return the pieces of text."""
    at = sorted({0, len(ids), *(c % (len(ids) + 1) for c in cuts or range(len(ids)))})
    pieces = [detokenizer.push(ids[a:b]) for a, b in zip(at, [*at[1:], len(ids)], strict=True)]
    return [*pieces, detokenizer.flush()]


def bytes_in_a_row(tokenizer: Tokenizer, ids: Sequence[int]) -> int:
    """The longest run of byte tokens."""
    longest = run = 0
    for id_ in ids:
        token = tokenizer.token(id_)
        if id_ in tokenizer.special_ids or token is None:
            continue
        run = run + 1 if stages.byte_of(token) is not None else 0
        longest = max(longest, run)
    return longest


def id_streams() -> st.SearchStrategy[list[int]]:
    """Ids that follow no rule; `within` brings them into a vocabulary."""
    return st.lists(st.integers(0, 1 << 16), max_size=40)


def within(tokenizer: Tokenizer, ids: Sequence[int]) -> list[int]:
    # One id beyond the vocabulary, as a model's padded logits allow.
    return [id_ % (tokenizer.vocab_size + 1) for id_ in ids]


@settings(max_examples=150)
@given(ids=id_streams(), cuts=st.lists(st.integers(0, 50), max_size=8))
def test_any_ids_in_any_pieces_are_the_text_that_transformers_decodes(
    pair: Pair, ids: list[int], cuts: list[int]
) -> None:
    ids = within(pair.ours, ids)
    if bytes_in_a_row(pair.ours, ids) <= stages.HELD_RUN_BYTES:
        assert "".join(stream(Detokenizer(pair.ours), ids, cuts)) == pair.text(ids)


@settings(max_examples=60)
@given(text=st.text(max_size=30))
def test_any_text_streams_as_transformers_decodes_it(pair: Pair, text: str) -> None:
    ids = pair.ours.encode(text, add_special_tokens=True)
    if bytes_in_a_row(pair.ours, ids) <= stages.HELD_RUN_BYTES:
        assert "".join(stream(Detokenizer(pair.ours), ids)) == pair.text(ids)


def test_no_piece_of_a_real_text_holds_half_a_character(pair: Pair) -> None:
    for text in folders.TEXTS:
        ids = pair.ours.encode(text)
        for piece in stream(Detokenizer(pair.ours), ids):
            assert REPLACEMENT not in piece


def test_every_character_is_shown_as_soon_as_its_last_byte_is_there(
    pairs: Callable[[str], Pair],
) -> None:
    tokenizer = pairs("byte_level").ours
    text = "a😀é你!"
    detokenizer, raw = Detokenizer(tokenizer), b""
    shown = ""
    for id_ in tokenizer.encode(text):
        raw += tokenizer.token_bytes(id_)
        shown += detokenizer.push([id_])
        assert shown == raw.decode(errors="ignore")
    assert shown == text


def test_an_answer_cut_within_a_character_ends_with_one_replacement(
    pairs: Callable[[str], Pair],
) -> None:
    tokenizer = pairs("byte_level").ours
    ids = [tokenizer.token_id(c) for c in "ðŁĺ"]
    assert None not in ids
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push([i for i in ids if i is not None]) == ""
    assert detokenizer.flush() == REPLACEMENT


# --- after a prompt --------------------------------------------------------------------------------

WITHOUT_CLEANING = [kind for kind in folders.KINDS if kind not in folders.CLEANED]


@settings(max_examples=150)
@given(text=st.sampled_from(folders.TEXTS), at=st.integers(0, 40), ids=id_streams())
@pytest.mark.parametrize("kind", WITHOUT_CLEANING)
def test_generated_text_goes_on_where_the_prompts_text_ends(
    pairs: Callable[[str], Pair], kind: str, text: str, at: int, ids: list[int]
) -> None:
    pair = pairs(kind)
    prompt = pair.ours.encode(text, add_special_tokens=True)[: at + 1]
    ids = within(pair.ours, ids)
    before, whole = pair.text(prompt), pair.text(prompt + ids)
    if not whole.startswith(before) or before.endswith(REPLACEMENT):
        return  # What is generated changes the prompt's own text: there is no place to go on at.
    if bytes_in_a_row(pair.ours, prompt) and bytes_in_a_row(pair.ours, ids):
        return  # They may make one run, of which transformers keeps all or nothing.
    made = "".join(stream(Detokenizer(pair.ours, prompt), ids))
    assert before + made == whole


@pytest.mark.parametrize("kind", ["smollm2", "byte_level", "llama", "gemma", "unigram_bytes"])
def test_a_character_that_the_prompt_began_is_completed(
    pairs: Callable[[str], Pair], kind: str
) -> None:
    tokenizer = pairs(kind).ours
    ids = tokenizer.encode("so 🐉")
    raw = [tokenizer.token_bytes(id_) for id_ in ids]
    for at in range(1, len(ids)):
        shown = b"".join(raw[:at]).decode(errors="ignore")
        made = "".join(stream(Detokenizer(tokenizer, ids[:at]), ids[at:]))
        assert (shown + made).lstrip() == "so 🐉"


@pytest.mark.parametrize("kind", ["llama", "gemma", "unigram_bytes"])
def test_a_prompts_last_character_is_not_repeated(pairs: Callable[[str], Pair], kind: str) -> None:
    tokenizer = pairs(kind).ours
    prompt = tokenizer.encode("so 🐉")
    assert "".join(stream(Detokenizer(tokenizer, prompt), tokenizer.encode("🐉")[-4:])) == "🐉"


def test_the_first_word_after_a_prompt_keeps_its_space(pairs: Callable[[str], Pair]) -> None:
    tokenizer = pairs("llama").ours
    the = tokenizer.token_id("▁the")
    assert the is not None
    assert Detokenizer(tokenizer, tokenizer.encode("See")).push([the]) == " the"
    assert Detokenizer(tokenizer).push([the]) == "the"
    assert Detokenizer(tokenizer, [1]).push([the]) == "the"


@settings(max_examples=60)
@given(ids=id_streams(), at=st.integers(0, 40))
def test_a_stream_goes_on_at_another_worker(pair: Pair, ids: list[int], at: int) -> None:
    prompt = pair.ours.encode("A prompt, and 🎉")
    ids = within(pair.ours, ids)
    at = min(at, len(ids))
    first, second = Detokenizer(pair.ours, prompt), Detokenizer(pair.ours, prompt)
    shown = "".join(first.push([id_]) for id_ in ids[:at])
    assert second.push(ids[:at]) == shown
    for id_ in ids[at:]:
        assert second.push([id_]) == first.push([id_])
    assert second.flush() == first.flush()


@settings(max_examples=60)
@given(ids=id_streams(), prompt=id_streams())
def test_the_end_of_a_prompt_is_enough(pair: Pair, ids: list[int], prompt: list[int]) -> None:
    ids, prompt = within(pair.ours, ids), within(pair.ours, prompt)
    text = pair.ours.encode("The cat sat on the mat")
    whole = stream(Detokenizer(pair.ours, prompt + text), ids)
    assert whole == stream(Detokenizer(pair.ours, text), ids)


# --- long runs of byte tokens ----------------------------------------------------------------------


def test_a_long_run_of_bytes_is_shown_character_by_character(
    pairs: Callable[[str], Pair],
) -> None:
    tokenizer = pairs("gemma").ours
    text = "აბგდ" * 30
    ids = tokenizer.encode(text)
    assert bytes_in_a_row(tokenizer, ids) == len(text.encode())
    detokenizer, shown = Detokenizer(tokenizer), ""
    for at, id_ in enumerate(ids, start=1):
        shown += detokenizer.push([id_])
        assert len(shown.encode()) >= at - stages.HELD_RUN_BYTES
    assert shown + detokenizer.flush() == text


def test_a_short_run_that_is_not_text_is_replaced_byte_by_byte_as_transformers_does(
    pairs: Callable[[str], Pair],
) -> None:
    pair = pairs("gemma")
    ids = pair.ours.encode("🐉🐉")[:-1]
    assert "".join(stream(Detokenizer(pair.ours), ids)) == pair.text(ids) == REPLACEMENT * 7


def test_bytes_that_are_never_text_do_not_pile_up(pairs: Callable[[str], Pair]) -> None:
    tokenizer = pairs("gemma").ours
    bad = tokenizer.token_id("<0xFF>")
    assert bad is not None
    made = stream(Detokenizer(tokenizer), [bad] * 1000)
    assert "".join(made) == REPLACEMENT * 1000
    assert max(map(len, made)) <= stages.HELD_RUN_BYTES + 1


# --- cleaning up -----------------------------------------------------------------------------------

cleanable = st.text(" .,?!'ntmsver a", max_size=40)


@settings(max_examples=300)
@given(text=cleanable, cuts=st.lists(st.integers(0, 60), max_size=8))
def test_cleaning_up_in_pieces_is_cleaning_up_the_whole(text: str, cuts: list[int]) -> None:
    stage = CleanUpStage()
    at = sorted({0, *(min(c, len(text)) for c in cuts)})
    pieces = [text[a:b] for a, b in zip(at, [*at[1:], len(text)], strict=True)]
    assert "".join(p for piece in pieces for p in stage.push(piece)) + "".join(stage.flush()) == (
        clean_up(text)
    )


@given(pieces=st.lists(st.text("ab", max_size=5)), old=st.text("ab", min_size=1, max_size=4))
def test_replacing_in_pieces_is_replacing_in_the_whole(pieces: list[str], old: str) -> None:
    stage = ReplaceText(old, "-")
    made = [p for piece in pieces for p in stage.push(piece)] + stage.flush()
    assert "".join(made) == "".join(pieces).replace(old, "-")


# --- time ------------------------------------------------------------------------------------------


def test_a_token_takes_no_longer_late_in_a_long_stream(pairs: Callable[[str], Pair]) -> None:
    for kind in ("byte_level", "llama"):
        tokenizer = pairs(kind).ours
        ids = tokenizer.encode(" ".join(folders.TEXTS)) * 200
        detokenizer = Detokenizer(tokenizer, ids)
        started = time.thread_time()
        for id_ in ids:
            detokenizer.push((id_,))
        assert (time.thread_time() - started) / len(ids) < 1e-3


def test_a_long_prompt_is_not_read_as_a_whole(pairs: Callable[[str], Pair]) -> None:
    class Counted(list[int]):
        read = 0

        def __getitem__(self, at: object) -> int:  # type: ignore[override]
            Counted.read += 1
            return super().__getitem__(at)  # type: ignore[call-overload,no-any-return]

        def __reversed__(self):  # type: ignore[no-untyped-def]
            return (self[at] for at in range(len(self) - 1, -1, -1))

    tokenizer = pairs("llama").ours
    Detokenizer(tokenizer, Counted(tokenizer.encode(" ".join(folders.TEXTS)) * 50))
    assert Counted.read <= 8
