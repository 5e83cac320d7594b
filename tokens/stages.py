"""The steps by which a decoder makes text of tokens, as a stream.

Covers one class for each decoder of the `tokenizers` library that can be streamed exactly: tokens
go in one by one, and what no later token can change comes out. Does not cover which of them a
model uses (`pie.tokens.decoding`).

Each step takes pieces and gives pieces. Before `Fuse` a piece is a token; after it, a stretch of
text. At the end of a prompt `settle` gives away all but an unfinished character, because a prompt's
text is not the answer's.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable
from typing import Protocol

import tokenizers
import tokenizers.decoders

REPLACEMENT = "\ufffd"

HELD_RUN_BYTES = 32
"""The longest run of byte tokens that is held back whole.

The library turns a whole run of byte tokens into U+FFFD when any of it is not UTF-8, so a run's
first character is certain only when the run ends. Eight emoji or ten Chinese characters are held
so that a stream equals the decoded whole. In a longer run, as in a script that the vocabulary
lacks, each character is given away once it is complete: readers would wait for whole sentences.
"""

_UNFINISHED_BYTES = 3
"""UTF-8 has four bytes a character at most."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>")
"""As the library reads it: Rust's `u8::from_str_radix` takes a plus sign."""


class Stage(Protocol):
    """One step. A step that has no state has no use for `flush` and `settle`."""

    def push(self, piece: str) -> list[str]:
        """Take a piece and return the pieces that no later one can change."""
        ...

    def flush(self) -> list[str]:
        """Return what was held back: no more pieces come."""
        ...

    def settle(self) -> list[str]:
        """Return what was held back, but for an unfinished character: the prompt ends here."""
        ...


class _Plain:
    """A step that holds nothing back."""

    __slots__ = ()

    def flush(self) -> list[str]:
        """Return what was held back."""
        return []

    def settle(self) -> list[str]:
        """Return what was held back, but for an unfinished character."""
        return []


class MapTokens(_Plain):
    """A step that maps each token by itself, knowing only whether it is the first."""

    __slots__ = ("_first", "_map", "_mapped")

    def __init__(self, map_: Callable[[str, bool], str], mapped: dict[str, str]) -> None:
        """Take the map and a dictionary, shared by streams, that remembers its results."""
        self._map = map_
        self._mapped = mapped
        self._first = True

    def push(self, piece: str) -> list[str]:
        """Take a piece and return what no later one can change."""
        if self._first:
            self._first = False
            return [self._map(piece, True)]
        text = self._mapped.get(piece)
        if text is None:
            text = self._mapped[piece] = self._map(piece, False)
        return [text]


class ByteRun:
    """`ByteFallback`: tokens such as `<0xE4>` are bytes, and a run of them is characters."""

    __slots__ = ("_run",)

    def __init__(self) -> None:
        self._run = bytearray()

    def push(self, piece: str) -> list[str]:
        """Take a piece and return what no later one can change."""
        value = byte_of(piece)
        if value is None:
            if not self._run:
                return [piece]
            return [*self.flush(), piece]
        self._run.append(value)
        if len(self._run) <= HELD_RUN_BYTES:
            return []
        rest = unfinished(self._run)
        text = _run_text(self._run[: len(self._run) - len(rest)])
        self._run = bytearray(rest)
        return [text] if text else []

    def flush(self) -> list[str]:
        """Return what was held back."""
        run, self._run = self._run, bytearray()
        return [_run_text(run)] if run else []

    def settle(self) -> list[str]:
        """Return what was held back, but for an unfinished character."""
        run, self._run = self._run, bytearray(unfinished(self._run))
        text = _run_text(run[: len(run) - len(self._run)])
        return [text] if text else []


class ByteLevel:
    """`ByteLevel`: each character of a token stands for a byte, and bytes are UTF-8 text."""

    __slots__ = ("_decoder", "_mapped")

    def __init__(self, mapped: dict[str, bytes]) -> None:
        """Take a dictionary, shared by streams, that remembers tokens' bytes."""
        self._mapped = mapped
        # Both put one U+FFFD for each maximal part of an ill-formed sequence.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, piece: str) -> list[str]:
        """Take a piece and return what no later one can change."""
        raw = self._mapped.get(piece)
        if raw is None:
            raw = self._mapped[piece] = level_bytes(piece)
        text = self._decoder.decode(raw)
        return [text] if text else []

    def flush(self) -> list[str]:
        """Return what was held back."""
        text = self._decoder.decode(b"", final=True)
        return [text] if text else []

    def settle(self) -> list[str]:
        """Return what was held back, but for an unfinished character."""
        return []


class WordEnds:
    """`BPEDecoder`: a suffix marks a word's end and is a space, but not at the end of the text."""

    __slots__ = ("_rest", "_suffix")

    def __init__(self, suffix: str) -> None:
        self._suffix = suffix
        self._rest: list[str] | None = None

    def push(self, piece: str) -> list[str]:
        """Take a piece and return what no later one can change."""
        before = self._owed(" ")
        first, *rest = piece.split(self._suffix)
        self._rest = rest
        return [before + first]

    def flush(self) -> list[str]:
        """Return what was held back."""
        text = self._owed("")
        self._rest = None
        return [text] if text else []

    def settle(self) -> list[str]:
        """Return what was held back, but for an unfinished character."""
        return []

    def _owed(self, end: str) -> str:
        """Return what follows the first suffix of the last token, with `end` for each suffix."""
        return "".join(end + part for part in self._rest or ())


class StripText(_Plain):
    """`Strip` after `Fuse`: takes some of a character off the beginning of the text."""

    __slots__ = ("_content", "_left")

    def __init__(self, content: str, start: int) -> None:
        self._content = content
        self._left = start

    def push(self, piece: str) -> list[str]:
        """Take a piece and return what no later one can change."""
        while self._left and piece:
            if not piece.startswith(self._content):
                self._left = 0
                break
            piece = piece[len(self._content) :]
            self._left -= 1
        return [piece]


def byte_of(token: str) -> int | None:
    """Return the byte that a token such as `<0xE4>` stands for; `None` for any other token."""
    found = _BYTE_TOKEN.fullmatch(token)
    return int(found[1], 16) if found else None


def level_bytes(token: str) -> bytes:
    """Return the bytes of a byte-level token, or of its spelling where it is not one."""
    try:
        return bytes(_LEVEL_BYTES[char] for char in token)
    except KeyError:
        return token.encode()


def unfinished(raw: bytes | bytearray) -> bytes:
    """Return the end of `raw` that begins a character and does not complete it."""
    for size in range(min(_UNFINISHED_BYTES, len(raw)), 0, -1):
        end = bytes(raw[-size:])
        decoder = codecs.getincrementaldecoder("utf-8")()
        try:
            if not decoder.decode(end):
                return end
        except UnicodeDecodeError:
            continue
    return b""


def strip_token(token: str, content: str, start: int, stop: int) -> str:
    """`Strip` before `Fuse`: take up to `start` and `stop` of a character off a token's ends."""
    for _ in range(start):
        token = token.removeprefix(content)
    for _ in range(stop):
        token = token.removesuffix(content)
    return token


def native_map(decoder: tokenizers.decoders.Decoder) -> Callable[[str, bool], str]:
    """Return a library's decoder that looks at one token at a time as a map."""

    def mapped(token: str, first: bool) -> str:
        return decoder.decode([token] if first else ["", token])

    return mapped


def _run_text(run: bytes | bytearray) -> str:
    """Return a run's text; one U+FFFD for each byte where it is not UTF-8."""
    try:
        return run.decode()
    except UnicodeDecodeError:
        return REPLACEMENT * len(run)


def _level_alphabet() -> dict[str, int]:
    """Return the byte of each character of GPT-2's byte-level alphabet.

    Printable bytes stand for themselves, the others for the characters from U+0100 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + at): byte for at, byte in enumerate(others)})
    return alphabet


_LEVEL_BYTES = _level_alphabet()
