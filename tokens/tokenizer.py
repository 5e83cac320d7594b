"""Text to token ids and back, by a model's own `tokenizer.json`.

Covers loading, encoding, decoding whole texts, the bytes of one token, and what other parts must
know about the vocabulary. Does not cover text that arrives token by token
(`pie.tokens.detokenizer`) or conversations (`pie.tokens.template`).

It gives what transformers' `PreTrainedTokenizerFast` gives for the same folder, which the tests
hold it to, without importing transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import tokenizers

from pie.tokens.cleanup import clean_up
from pie.tokens.decoding import DecodingPlan, plan_decoding
from pie.tokens.errors import TextError, TokenizerError
from pie.tokens.files import TOKENIZER_FILE, TokenFiles

_TOKEN_BYTES_CACHED = 65536


class Tokenizer:
    """One model's tokenizer. Safe to use from several threads; nothing changes it after loading.

    Use `Tokenizer.load`.

    Attributes:
        folder: Where it was loaded from.
        vocab_size: One more than the largest id it knows. A model may have more logits than that.
        eos_token_ids: Ids that end an answer, in order.
        special_ids: Ids that a decoded text does not show.
        added_tokens: What a text is cut at before all else.
        splits_special: Whether special tokens that a text spells are text like any other.
        digest: BLAKE3 over tokenizer and template, in hex. Equal digests, equal tokens.
        plan: How its decoder turns tokens into text, for `pie.tokens.detokenizer`.
    """

    def __init__(self, files: TokenFiles) -> None:
        self.folder = files.folder
        self._inner = _load(files)
        flags = files.config
        added = self._inner.get_added_tokens_decoder()
        self.special_ids = frozenset(id_ for id_, token in added.items() if token.special)
        self.added_tokens = tuple(added.values())
        self.splits_special = bool(flags.get("split_special_tokens"))
        self.vocab_size = (
            max(self._inner.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        )
        end = files.named_tokens.get("eos_token")
        self.eos_token_ids = files.end_ids(None if end is None else self.token_id(end))
        self.digest = files.digest
        # As transformers: cleaning up was made for WordPiece and would spoil what BPE spells.
        spoils = isinstance(self._inner.model, tokenizers.models.BPE) and not flags.get(
            "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
        )
        self._cleans_up = bool(flags.get("clean_up_tokenization_spaces")) and not spoils
        self.plan: DecodingPlan = plan_decoding(self._inner, cleans_up=self._cleans_up)
        self._bytes_of = lru_cache(_TOKEN_BYTES_CACHED)(self._find_bytes)

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Load the tokenizer of a model's folder.

        Reads `tokenizer.json` and, where present, `tokenizer_config.json`,
        `special_tokens_map.json`, `generation_config.json`, `config.json` and chat templates.

        Raises:
            TokenizerError: The folder or `tokenizer.json` is missing or broken, or it decodes in
                a way that cannot be streamed exactly.
        """
        return cls(TokenFiles(Path(folder)))

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of `text`.

        Special tokens that are spelt out in `text` become their ids.

        Args:
            text: Any text; a rendered conversation brings its own special tokens.
            add_special_tokens: Add what the model expects around a plain text, such as `bos`.

        Raises:
            TextError: `text` holds half of a surrogate pair.
        """
        try:
            # The batch call lets other threads run, and the fast one leaves out offsets.
            return self._inner.encode_batch_fast([text], add_special_tokens=add_special_tokens)[
                0
            ].ids
        except TypeError as error:
            raise TextError(_surrogate(text)) from error

    def as_json(self) -> str:
        """Return it as the text of a `tokenizer.json`, with all that was added while loading."""
        return self._inner.to_str()

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`; an id that the vocabulary lacks adds nothing."""
        text = self._inner.decode(ids, skip_special_tokens=skip_special_tokens)
        return clean_up(text) if self._cleans_up else text

    def token(self, id_: int) -> str | None:
        """Return a token as the vocabulary spells it, such as `Ġthe`; `None` for an unknown id."""
        return self._inner.id_to_token(id_) if id_ >= 0 else None

    def token_id(self, token: str) -> int | None:
        """Return the id of a token as the vocabulary spells it; `None` where there is none."""
        return self._inner.token_to_id(token)

    def token_bytes(self, id_: int) -> bytes:
        """Return the bytes that a token adds in the middle of a text, special tokens included.

        They may be part of a character. An unknown id adds nothing.
        """
        return self._bytes_of(id_)

    def _find_bytes(self, id_: int) -> bytes:
        token = self.token(id_)
        return b"" if token is None else self.plan.token_bytes(token)


def _load(files: TokenFiles) -> tokenizers.Tokenizer:
    """Load `tokenizer.json` and add what the configuration adds, as transformers does."""
    path = files.folder / TOKENIZER_FILE
    if not path.is_file():
        raise TokenizerError(
            f"{files.folder} has no {TOKENIZER_FILE}, which Pie needs to turn text into tokens; "
            "with transformers, AutoTokenizer.from_pretrained(…).save_pretrained(…) writes one."
        )
    try:
        inner = tokenizers.Tokenizer.from_str(files.read(TOKENIZER_FILE).decode())
    # `tokenizers` raises nothing narrower.
    except Exception as error:
        raise TokenizerError(f"{path} is not a tokenizer that can be loaded: {error}.") from error
    inner.no_truncation()
    inner.no_padding()
    inner.encode_special_tokens = bool(files.config.get("split_special_tokens"))
    _add_tokens(inner, files)
    return inner


def _add_tokens(inner: tokenizers.Tokenizer, files: TokenFiles) -> None:
    """Add the configuration's tokens that `tokenizer.json` lacks or has with other properties."""
    known = list(inner.get_added_tokens_decoder().values())
    spelt = {token.content for token in known}
    alike = {repr(token) for token in known}
    special = [tokenizers.AddedToken(**token) for token in files.special_tokens]
    wanted = [tokenizers.AddedToken(**token) for token in files.added_tokens]
    wanted = [token for token in wanted if repr(token) not in alike]
    spelt.update(token.content for token in wanted)
    named = set(files.named_tokens.values())
    again = {token.content for token in wanted}
    wanted += [t for t in known if t.content in named and not t.special and t.content not in again]
    for token in wanted:
        token.special = token.special or token.content in named
    for token in special:
        if token.content not in spelt:
            spelt.add(token.content)
            wanted.append(token)
    if wanted:
        inner.add_tokens(wanted)


def _surrogate(text: str) -> str:
    """Say where `text` holds half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"The text holds half of a surrogate pair at character {error.start}."
    raise AssertionError("only a lone surrogate is refused")
