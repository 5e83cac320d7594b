"""How a tokenizer's decoder turns tokens into text.

Covers reading the decoder of a `tokenizer.json`, the steps that it consists of, and the bytes of
one token. Does not cover the steps themselves (`pie.tokens.stages`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import tokenizers
import tokenizers.decoders

from pie.tokens import stages
from pie.tokens.cleanup import CleanUpStage, ReplaceText
from pie.tokens.errors import TokenizerError
from pie.tokens.stages import Stage

Spec = Mapping[str, object]
"""One decoder as `tokenizer.json` writes it."""


@dataclass(frozen=True)
class Step:
    """One step of a decoder."""

    open: Callable[[], Stage]
    """Makes the step for one stream."""
    alone: Callable[[str], str | bytes]
    """What the step makes of one token in the middle of a text; bytes end the way."""


@dataclass(frozen=True)
class DecodingPlan:
    """The steps of a tokenizer's decoder, in order."""

    steps: tuple[Step, ...]

    def open(self) -> list[Stage]:
        """Make the steps for one stream."""
        return [step.open() for step in self.steps]

    def token_bytes(self, token: str) -> bytes:
        """Return the bytes that `token` adds in the middle of a text."""
        for step in self.steps:
            value = step.alone(token)
            if isinstance(value, bytes):
                return value
            token = value
        return token.encode()


def plan_decoding(tokenizer: tokenizers.Tokenizer, *, cleans_up: bool) -> DecodingPlan:
    """Read a tokenizer's decoder.

    Args:
        tokenizer: The library's.
        cleans_up: Whether spaces before punctuation are taken out at the end.

    Raises:
        TokenizerError: The decoder has a part that cannot be streamed exactly.
    """
    decoder = tokenizer.decoder
    steps = [_joined()] if decoder is None else list(_steps(json.loads(decoder.__getstate__())))
    if cleans_up:
        steps.append(Step(CleanUpStage, _same))
    return DecodingPlan(tuple(steps))


def _steps(decoder: Spec) -> Iterator[Step]:
    """Yield the steps of a decoder."""
    fused = False
    for spec in _parts(decoder):
        kind = str(spec["type"])
        if kind == "Fuse":
            fused = True
            continue
        step = _text_step(kind, spec) if fused else _token_step(kind, spec)
        if step is None:
            where = " after Fuse" if fused else ""
            raise TokenizerError(
                f"The tokenizer's decoder has a {kind} step{where}, which Pie cannot stream; "
                "it knows ByteLevel, ByteFallback, Metaspace, Replace, Strip, Fuse, WordPiece and "
                "BPEDecoder."
            )
        yield step
        fused = fused or kind == "ByteLevel"


def _parts(decoder: Spec) -> Iterator[Spec]:
    """Yield the decoders of a decoder, sequences within sequences laid flat."""
    if decoder["type"] != "Sequence":
        yield decoder
        return
    parts = decoder["decoders"]
    assert isinstance(parts, list)
    for part in parts:
        yield from _parts(part)


def _token_step(kind: str, spec: Spec) -> Step | None:
    """Return the step of a decoder that works token by token; `None` where there is none."""
    match kind:
        case "ByteLevel":
            known: dict[str, bytes] = {}
            return Step(lambda: stages.ByteLevel(known), stages.level_bytes)
        case "ByteFallback":
            return Step(stages.ByteRun, _byte_or_same)
        case "BPEDecoder":
            suffix = str(spec["suffix"])
            return Step(lambda: stages.WordEnds(suffix), lambda token: token.replace(suffix, " "))
        case "Strip":
            content, start, stop = str(spec["content"]), _int(spec["start"]), _int(spec["stop"])
            return _mapped(lambda token, _: stages.strip_token(token, content, start, stop))
        case "Metaspace" | "Replace" | "WordPiece":
            return _mapped(stages.native_map(_native(kind, spec)))
    return None


def _text_step(kind: str, spec: Spec) -> Step | None:
    """Return the step of a decoder that works on the whole text; `None` where there is none."""
    if kind == "Strip" and not spec["stop"]:
        content, start = str(spec["content"]), _int(spec["start"])
        return Step(lambda: stages.StripText(content, start), _same)
    pattern = spec.get("pattern")
    if kind == "Replace" and isinstance(pattern, Mapping) and pattern.get("String"):
        old, new = str(pattern["String"]), str(spec["content"])
        return Step(lambda: ReplaceText(old, new), lambda text: text.replace(old, new))
    return None


def _native(kind: str, spec: Spec) -> tokenizers.decoders.Decoder:
    """Return the library's own decoder for a specification."""
    if kind == "Metaspace":
        return tokenizers.decoders.Metaspace(
            str(spec["replacement"]), str(spec.get("prepend_scheme", "always"))
        )
    if kind == "WordPiece":
        return tokenizers.decoders.WordPiece(str(spec["prefix"]), bool(spec["cleanup"]))
    pattern = spec["pattern"]
    assert isinstance(pattern, Mapping)
    old = pattern["String"] if "String" in pattern else tokenizers.Regex(str(pattern["Regex"]))
    return tokenizers.decoders.Replace(old, str(spec["content"]))


def _joined() -> Step:
    """Return the step of a tokenizer without a decoder: tokens with spaces between."""
    return _mapped(lambda token, first: token if first else f" {token}")


def _mapped(map_: Callable[[str, bool], str]) -> Step:
    known: dict[str, str] = {}
    return Step(lambda: stages.MapTokens(map_, known), lambda token: map_(token, False))


def _byte_or_same(token: str) -> str | bytes:
    value = stages.byte_of(token)
    return token if value is None else bytes([value])


def _same(text: str) -> str:
    return text


def _int(value: object) -> int:
    assert isinstance(value, int)
    return value
