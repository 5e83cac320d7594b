"""The configuration: `pie.toml`, environment and command line, composed and checked.

Each package declares its own section in `F/settings.py`; this module alone reads files and the
environment, and passes the sections down. Covers where each value came from. Does not cover the
reference page (`pie.cluster.reference`) or the policy file (`pie.policies.loader`).
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ByteSize, ConfigDict, Field, SecretStr, ValidationError
from pydantic_core import ErrorDetails

from pie.cluster.errors import ConfigError
from pie.cluster.settings import ClusterSettings
from pie.index.address import masked
from pie.index.settings import IndexSettings
from pie.policies.settings import PolicySettings
from pie.pool.settings import PoolSettings
from pie.router.settings import RouterSettings
from pie.worker.settings import ModelSettings, ProgramSettings

DEFAULT_FILE = Path("pie.toml")
ENV_PREFIX = "PIE_"
_ENV_SEPARATOR = "__"
_MAX_FILE_BYTES = 1 << 20
_SHOWN_CHARS = 80
_BOUNDS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}

Key = tuple[str, ...]


class PieConfig(BaseModel):
    """Everything that can be set, one section a package."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cluster: ClusterSettings = Field(default_factory=ClusterSettings)
    model: ModelSettings = Field(default_factory=ModelSettings)
    router: RouterSettings = Field(default_factory=RouterSettings)
    pool: PoolSettings = Field(default_factory=PoolSettings)
    index: IndexSettings = Field(default_factory=IndexSettings)
    policies: PolicySettings = Field(default_factory=PolicySettings)
    programs: ProgramSettings = Field(default_factory=ProgramSettings)


@dataclass(frozen=True)
class LoadedConfig:
    """The effective configuration and where each value that is not a default came from."""

    config: PieConfig
    origins: Mapping[Key, str]
    """`(section, key)` to `pie.toml:3`, `PIE_MODEL__DTYPE` or `--port`."""

    def values(self) -> Iterable[tuple[Key, object, str]]:
        """List every value in order as `(key, value, where it came from)`."""
        for section in type(self.config).model_fields:
            settings = getattr(self.config, section)
            for name in type(settings).model_fields:
                key = (section, name)
                yield key, getattr(settings, name), self.origins.get(key, "default")


def load_config(
    file: Path | None,
    environment: Mapping[str, str],
    flags: Mapping[Key, tuple[str, object]] | None = None,
) -> LoadedConfig:
    """Compose the configuration; a flag wins over the environment, that over the file.

    Args:
        file: The TOML file; None reads `pie.toml` where the working directory has one.
        environment: Variables such as `PIE_MODEL__DTYPE`; others are passed over.
        flags: `(section, key)` to the flag's name and value.

    Raises:
        ConfigError: With every problem, each with its place and what is allowed.
    """
    problems: list[str] = []
    values: dict[str, dict[str, Any]] = {}
    origins: dict[Key, str] = {}
    _read_file(file, values, origins, problems)
    for name, key, text in _environment_values(environment, problems):
        values.setdefault(key[0], {})[key[1]] = _from_text(text)
        origins[key] = name
    for key, (flag, value) in (flags or {}).items():
        values.setdefault(key[0], {})[key[1]] = value
        origins[key] = flag
    try:
        config = PieConfig.model_validate(values)
    except ValidationError as error:
        problems += (_describe(details, origins) for details in error.errors())
        config = None
    if problems or config is None:
        raise ConfigError(problems)
    return LoadedConfig(config, origins)


def sections() -> dict[str, type[BaseModel]]:
    """Return the settings class of every section, in order."""
    found: dict[str, type[BaseModel]] = {}
    for name, field in PieConfig.model_fields.items():
        assert isinstance(field.annotation, type)
        found[name] = field.annotation
    return found


def _read_file(
    file: Path | None,
    values: dict[str, dict[str, Any]],
    origins: dict[Key, str],
    problems: list[str],
) -> None:
    if file is None:
        if not DEFAULT_FILE.is_file():
            return
        file = DEFAULT_FILE
    try:
        if file.stat().st_size > _MAX_FILE_BYTES:
            problems.append(f"{file}: larger than {_MAX_FILE_BYTES >> 20} MiB")
            return
        text = file.read_text(encoding="utf-8")
        document = tomllib.loads(text)
    except OSError as error:
        problems.append(f"{file}: cannot be read: {error.strerror}")
        return
    except UnicodeDecodeError:
        problems.append(f"{file}: is not UTF-8 text")
        return
    except tomllib.TOMLDecodeError as error:
        problems.append(f"{file}: is not TOML: {error}")
        return
    lines = _key_lines(text)
    for section, table in document.items():
        place = f"{file}:{lines.get((section,), 1)}"
        if not isinstance(table, dict):
            problems.append(f"{place}: {section}: a section is wanted, such as [model]")
            continue
        values[section] = dict(table)
        origins[section,] = place
        for name in table:
            origins[section, name] = (
                f"{file}:{lines.get((section, name), lines.get((section,), 1))}"
            )


def _key_lines(text: str) -> dict[Key, int]:
    """Return the line of each section and key; those in inline tables have their table's."""
    lines: dict[Key, int] = {}
    section: Key = ()
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*\[\s*([^\[\]]+?)\s*\]", line):
            section = tuple(part.strip(" \"'") for part in header[1].split("."))
            lines.setdefault(section[:1], number)
        elif pair := re.match(r"\s*([\w.\"'-]+)\s*=", line):
            key = section + tuple(part.strip("\"'") for part in pair[1].split("."))
            lines.setdefault(key[:1], number)
            lines.setdefault(key[:2], number)
    return lines


def _environment_values(
    environment: Mapping[str, str], problems: list[str]
) -> Iterable[tuple[str, Key, str]]:
    known = sections()
    for name in sorted(environment):
        if not name.startswith(ENV_PREFIX):
            continue
        section, separator, key = name.removeprefix(ENV_PREFIX).lower().partition(_ENV_SEPARATOR)
        if not separator:
            section, _, key = section.partition("_")
            if section in known:
                meant = f"{ENV_PREFIX}{section}{_ENV_SEPARATOR}{key}".upper()
                problems.append(f"{name}: two underscores join section and key: {meant}")
        elif section in known:
            yield name, (section, key), environment[name]
        else:
            problems.append(f"{name}: {_unknown('section', section, known)}")


def _from_text(text: str) -> object:
    """Return what a variable's text means: a TOML array or table where it looks like one."""
    if text[:1] in "[{" and text:
        try:
            parsed: dict[str, object] = tomllib.loads(f"value = {text}")
        except tomllib.TOMLDecodeError:
            return text
        return parsed["value"]
    return text


def _describe(details: ErrorDetails, origins: Mapping[Key, str]) -> str:
    """Say in one sentence what is wrong where, and what is allowed."""
    location = tuple(str(part) for part in details["loc"])
    place = (
        origins.get(location[:2]) or origins.get(location[:1]) or _section_place(location, origins)
    )
    name = ".".join(location)
    if details["type"] == "extra_forbidden":
        known = sections()
        if len(location) == 1:
            return f"{place}: {_unknown('section', location[0], known)}"
        return f"{place}: {_unknown('key', location[-1], known[location[0]].model_fields)}"
    message = _said(details, location)
    got = "" if _is_secret(location) else f" (got {_shortened(details['input'])})"
    return f"{place}: {name}: {message}{got}"


def _said(details: ErrorDetails, location: Key) -> str:
    """Say what is wrong, in the words of the setting where pydantic has none that help."""
    settings = sections().get(location[0])
    field = settings.model_fields.get(location[1]) if settings and len(location) > 1 else None
    if field is not None and details["type"] == "string_pattern_mismatch":
        return f"cannot be this. {field.description}"
    for name, word in _BOUNDS.items():
        bound = details.get("ctx", {}).get(name)
        if field is not None and bound is not None:
            is_size = field.annotation is ByteSize
            return f"must be {word} {ByteSize(bound).human_readable() if is_size else bound}"
    message = details["msg"].removeprefix("Value error, ")
    return message[:1].lower() + message[1:]


def _section_place(location: Key, origins: Mapping[Key, str]) -> str:
    """Return where the values of a section came from, for a problem of the section as a whole."""
    places = [place for key, place in origins.items() if key[:1] == location[:1]]
    return ", ".join(places) or "pie.toml"


def _is_secret(location: Key) -> bool:
    """Say whether what stands there must not be shown, or holds something that must not."""
    settings = sections().get(location[0])
    fields = settings.model_fields if settings else {}
    if len(location) == 1:
        return any(field.annotation is SecretStr for field in fields.values())
    return location[1] in fields and fields[location[1]].annotation is SecretStr


def _shortened(value: object) -> str:
    text = masked(repr(value))
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"


def _unknown(what: str, name: str, allowed: Iterable[str]) -> str:
    names = list(allowed)
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"unknown {what} {name!r}{hint} Allowed: {', '.join(names)}".replace(
        "' Allowed", "'. Allowed"
    )
