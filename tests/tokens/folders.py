"""Folders with small tokenizers of every kind, made by training on a few sentences."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers as pre,
    processors,
    trainers,
)

TEXTS = [
    "The cat sat on the mat, and it didn't move. Why? Nobody knows!",
    "We've seen that they're here; I'm sure it's 42 or 1,024 degrees .",
    "def add(a, b):\n    return a + b  # two  spaces\n\n\tand a tab",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    "你好，世界！今天天气很好。 日本語のテキストです。 한국어 문장",
    "Привет, мир! Как дела? Γειά σου Κόσμε",
    "emoji 😀 👩‍👩‍👧 🇩🇪 and more 🎉🎉",
]
CHARACTERS_LEARNED = TEXTS[:4]
"""What the word-piece-like vocabularies are trained on, so that they lack most of the rest."""

SPECIAL = ["<unk>", "<s>", "</s>"]
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_VOCABULARY = 400


def byte_level() -> Tokenizer:
    """GPT-2's kind: any bytes, and no space at the beginning."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=["<s>", "</s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    # Not special, with characters in and out of the byte alphabet.
    tokenizer.add_tokens([AddedToken("<tool>", special=False), AddedToken("né", special=False)])
    tokenizer.add_tokens([AddedToken("｜▁｜", special=False)])
    return tokenizer


def llama() -> Tokenizer:
    """Llama 2's kind: SentencePiece's BPE with byte tokens, and a space before the first word."""
    learned = Tokenizer(models.BPE(unk_token="<unk>"))
    learned.pre_tokenizer = pre.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL, show_progress=False)
    learned.train_from_iterator(CHARACTERS_LEARNED, trainer)
    model = json.loads(learned.to_str())["model"]
    pieces = [*SPECIAL, *_BYTES, *(t for t in model["vocab"] if t not in SPECIAL)]
    merges = [tuple(merge) for merge in model["merges"]]
    vocabulary = {piece: at for at, piece in enumerate(pieces)}
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        "<s> $A", "<s> $A <s> $B", [("<s>", 1)]
    )
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def gemma() -> Tokenizer:
    """Gemma's kind: as Llama's, but nothing is taken off the beginning."""
    tokenizer = llama()
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def unigram() -> Tokenizer:
    """T5's kind: SentencePiece's unigram model and `Metaspace`, without byte tokens."""
    tokenizer = _unigram(bytes_=False)
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def unigram_bytes() -> Tokenizer:
    """A unigram model with byte tokens, whose spaces are made after the bytes' characters."""
    tokenizer = _unigram(bytes_=True)
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return tokenizer


def word_piece() -> Tokenizer:
    """BERT's kind: pieces of words with spaces between the words."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
    tokenizer.pre_tokenizer = pre.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(
        vocab_size=_VOCABULARY, special_tokens=SPECIAL, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens(["n't", "' s", " '", "'re", "ve ."])
    return tokenizer


def word_ends() -> Tokenizer:
    """GPT-1's kind: a suffix marks where a word ends."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre.BertPreTokenizer()
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=SPECIAL,
        end_of_word_suffix="</w>",
        show_progress=False,
    )
    tokenizer.train_from_iterator(CHARACTERS_LEARNED, trainer)
    tokenizer.add_tokens(["two</w>words</w>", "mid</w>dle"])
    return tokenizer


def patterns() -> Tokenizer:
    """A decoder with a pattern for each token and a replacement over the whole text."""
    tokenizer = gemma()
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(Regex("[▁_]"), " "),
            decoders.Strip("t", 1, 0),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Replace("  ", "\u00a0"),
        ]
    )
    return tokenizer


def no_decoder() -> Tokenizer:
    """Whole words, and no decoder."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre.Whitespace()
    trainer = trainers.WordLevelTrainer(special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    make.__name__: make
    for make in (
        byte_level,
        llama,
        gemma,
        unigram,
        unigram_bytes,
        word_piece,
        word_ends,
        patterns,
        no_decoder,
    )
}

CLEANED = ("word_piece", "unigram", "no_decoder")
"""Kinds whose configuration asks for spaces before punctuation to be taken out."""


def write(kind: str, folder: Path) -> Path:
    """Write a tokenizer of a kind and its configuration to a new folder."""
    folder.mkdir(parents=True)
    KINDS[kind]().save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "clean_up_tokenization_spaces": kind in CLEANED or kind == "llama",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def _unigram(*, bytes_: bool) -> Tokenizer:
    learned = Tokenizer(models.Unigram())
    learned.pre_tokenizer = pre.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
    )
    learned.train_from_iterator(CHARACTERS_LEARNED, trainer)
    vocabulary = list(_pieces(learned, bytes_=bytes_))
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=bytes_))
    tokenizer.pre_tokenizer = pre.Metaspace()
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def _pieces(learned: Tokenizer, *, bytes_: bool) -> Iterator[tuple[str, float]]:
    yield from ((piece, 0.0) for piece in SPECIAL)
    if bytes_:
        yield from ((piece, -20.0) for piece in _BYTES)
    for piece, score in json.loads(learned.to_str())["model"]["vocab"]:
        if piece not in SPECIAL:
            yield piece, score
