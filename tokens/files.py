"""The files of a model's folder that make tokens and text.

Covers reading them, the special tokens that they name, the ids that end an answer, and the digest
that tells whether two hosts turn text into the same tokens. Does not cover `tokenizer.json` itself
(`pie.tokens.tokenizer`) or rendering (`pie.tokens.template`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from blake3 import blake3

from pie.tokens.errors import TokenizerError

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
GENERATION_FILE = "generation_config.json"
MODEL_FILE = "config.json"
TEMPLATE_FILE = "chat_template.jinja"
TEMPLATES_FOLDER = "additional_chat_templates"

DEFAULT_TEMPLATE = "default"
TOOL_TEMPLATE = "tool_use"

SPECIAL_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_EXTRA_NAMES = ("extra_special_tokens", "additional_special_tokens")

Json = Mapping[str, object]


@dataclass(frozen=True)
class TokenFiles:
    """The small files of a model's folder beside `tokenizer.json`; any of them may be missing.

    Raises:
        TokenizerError: The folder is missing, or one of its files is not what it should be.
    """

    folder: Path

    def __post_init__(self) -> None:
        if not self.folder.is_dir():
            raise TokenizerError(f"There is no folder {self.folder}.")

    @cached_property
    def config(self) -> Json:
        """`tokenizer_config.json`, with what an older `special_tokens_map.json` adds to it."""
        config = dict(self._json(CONFIG_FILE))
        if "added_tokens_decoder" not in config:
            config.update(self._json(SPECIAL_TOKENS_FILE))
        return config

    @cached_property
    def named_tokens(self) -> dict[str, str]:
        """Text of the special tokens that have a name, such as `bos_token`, by name."""
        named: dict[str, str] = {}
        for name, value in self.config.items():
            text = _token_text(value)
            if text is not None and name.endswith("_token"):
                named[name] = text
        for extra in _EXTRA_NAMES:
            tokens = self.config.get(extra)
            if isinstance(tokens, Mapping):
                named.update({k: t for k, v in tokens.items() if (t := _token_text(v)) is not None})
        return named

    @cached_property
    def added_tokens(self) -> list[dict[str, Any]]:
        """Tokens that the configuration adds to the vocabulary, as `AddedToken`'s arguments."""
        added = self.config.get("added_tokens_decoder")
        if not isinstance(added, Mapping):
            return []
        try:
            return [_added(added[id_]) for id_ in sorted(added, key=int)]
        except ValueError as error:
            raise self._bad(error) from error

    @cached_property
    def special_tokens(self) -> list[dict[str, Any]]:
        """Every special token that the configuration names, as `AddedToken`'s arguments."""
        values = [self.config[name] for name in self.named_tokens if name in self.config]
        for extra in _EXTRA_NAMES:
            tokens = self.config.get(extra)
            if isinstance(tokens, Mapping):
                values += tokens.values()
            elif isinstance(tokens, list):
                values += tokens
        try:
            return [{**_added(value), "special": True} for value in values]
        except ValueError as error:
            raise self._bad(error) from error

    @cached_property
    def templates(self) -> dict[str, str]:
        """Chat templates by name; empty where the model has none.

        Files of their own come before `chat_template` in the configuration, which is one template,
        or several with names.
        """
        found = dict(self._template_files())
        if found:
            return found
        value = self.config.get("chat_template")
        if isinstance(value, str):
            return {DEFAULT_TEMPLATE: value}
        if value is None:
            return {}
        try:
            return _named_templates(value)
        except ValueError as error:
            raise TokenizerError(f"{self.folder / CONFIG_FILE}: chat_template {error}.") from error

    def end_ids(self, tokenizer_end: int | None) -> tuple[int, ...]:
        """Return the ids that end an answer, in order.

        Those of `generation_config.json`, without it those of `config.json`; and always the
        tokenizer's own, because chat models are shipped whose generation configuration names
        only the end of a document, not of a turn.
        """
        found = _ids(self._json(GENERATION_FILE).get("eos_token_id"))
        if not found:
            model = self._json(MODEL_FILE)
            text = model.get("text_config")
            found = _ids(model.get("eos_token_id"))
            if not found and isinstance(text, Mapping):
                found = _ids(text.get("eos_token_id"))
        if tokenizer_end is not None:
            found.add(tokenizer_end)
        return tuple(sorted(found))

    @cached_property
    def digest(self) -> str:
        """BLAKE3 over what makes tokens and text, in hex; the same on every host.

        Paths and library versions that tools leave in the configuration are no part of it.
        """
        kept = {
            "special": self.special_tokens,
            "named": self.named_tokens,
            "added": self.added_tokens,
            "flags": {
                name: value
                for name, value in self.config.items()
                if name.startswith("clean_up_tokenization_spaces") or name == "split_special_tokens"
            },
            "templates": self.templates,
        }
        fields = [
            self.read(TOKENIZER_FILE),
            json.dumps(kept, sort_keys=True, ensure_ascii=False).encode(errors="surrogatepass"),
        ]
        digest = blake3(b"pie/tokens")
        for value in fields:
            digest.update(len(value).to_bytes(8, "little") + value)
        return digest.hexdigest()

    def read(self, name: str) -> bytes:
        """Return a file's bytes."""
        try:
            return (self.folder / name).read_bytes()
        except OSError as error:
            raise TokenizerError(
                f"{self.folder / name} cannot be read: {error.strerror}."
            ) from error

    def _bad(self, error: ValueError) -> TokenizerError:
        return TokenizerError(f"{self.folder / CONFIG_FILE} has a bad token: {error}.")

    def _template_files(self) -> Iterator[tuple[str, str]]:
        """Yield the name and text of templates that have files of their own."""
        if (self.folder / TEMPLATE_FILE).is_file():
            yield DEFAULT_TEMPLATE, self._text(TEMPLATE_FILE)
        for path in sorted((self.folder / TEMPLATES_FOLDER).glob("*.jinja")):
            yield path.stem, self._text(f"{TEMPLATES_FOLDER}/{path.name}")

    def _text(self, name: str) -> str:
        try:
            # As a text file is opened: a template's own carriage returns are line ends.
            return self.read(name).decode().replace("\r\n", "\n").replace("\r", "\n")
        except UnicodeDecodeError as error:
            raise TokenizerError(f"{self.folder / name} is not UTF-8 text.") from error

    def _json(self, name: str) -> Json:
        """Return a JSON file's object; an empty one where there is no such file."""
        if not (self.folder / name).is_file():
            return {}
        try:
            value = json.loads(self._text(name))
        except json.JSONDecodeError as error:
            raise TokenizerError(f"{self.folder / name} is not valid JSON: {error}.") from error
        if not isinstance(value, dict):
            raise TokenizerError(f"{self.folder / name} holds no JSON object.")
        return value


def _token_text(value: object) -> str | None:
    """Return a token's text, however the configuration spells it; `None` where it is no token."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _added(value: object) -> dict[str, Any]:
    """Return `AddedToken`'s arguments for a token, however the configuration spells it.

    Raises:
        ValueError: It is no token.
    """
    text = _token_text(value)
    if text is None:
        raise ValueError(f"{value!r} is no token")
    flags = value if isinstance(value, Mapping) else {}
    return {"content": text, **{name: bool(flags[name]) for name in _FLAGS if name in flags}}


def _named_templates(value: object) -> dict[str, str]:
    """Return templates by name, from an object or from a list of names and templates.

    Raises:
        ValueError: It is neither.
    """
    if isinstance(value, list):
        try:
            value = {entry["name"]: entry["template"] for entry in value}
        except (KeyError, TypeError) as error:
            raise ValueError("has an entry without a name or a template") from error
    if not isinstance(value, Mapping) or not all(isinstance(t, str) for t in value.values()):
        raise ValueError("is neither a text nor several with names")
    return {str(name): str(text) for name, text in value.items()}


def _ids(value: object) -> set[int]:
    """Return one id or a list of them as a set."""
    if isinstance(value, int):
        return {value}
    return {id_ for id_ in value if isinstance(id_, int)} if isinstance(value, list) else set()
