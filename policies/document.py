"""A YAML document whose values know where they stand.

Covers reading YAML with lines and columns, and refusing what could hurt: too much text, aliases,
deep nesting, tags, keys given twice. Does not cover what the values mean (`pie.policies.loader`).
"""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass
from typing import Protocol

import yaml

from pie.policies.errors import Problem


class _Mark(Protocol):
    line: int
    column: int


MAX_BYTES = 1 << 20
"""A policy file is some lines long; a megabyte is a mistake or an attack."""

_MAX_DEPTH = 16
_MAX_PROBLEMS = 50

_COLLECTION_TAGS = {"tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"}

_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml where PyYAML was built with it: ten times faster on a file near the limit."""


@dataclass(frozen=True, slots=True)
class Value:
    """A value with its place. Lines and columns count from 1."""

    line: int
    column: int
    plain: object
    """The value as Python has it: mappings as dicts, sequences as lists, None where empty."""
    entries: list[Entry] | None = None
    """A mapping's entries, else None."""
    items: list[Value] | None = None
    """A sequence's values, else None."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A key of a mapping with its place and its value."""

    line: int
    column: int
    key: str
    value: Value


def parse_document(text: str | bytes, problems: list[Problem]) -> Value:
    """Return the document in `text`; adds what is wrong with it to `problems`.

    An empty document is an empty value; so is one that cannot be read.
    """
    nothing = Value(1, 1, None)
    raw = text.encode(errors="surrogatepass") if isinstance(text, str) else text
    if len(raw) > MAX_BYTES:
        problems.append(Problem(0, 0, "", f"is larger than {MAX_BYTES >> 20} MiB"))
        return nothing
    try:
        decoded = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = raw[: error.start]
        line = before.count(b"\n") + 1
        column = error.start - (before.rfind(b"\n") + 1) + 1
        but = " but UTF-16" if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else ""
        problems.append(Problem(line, column, "", f"is not UTF-8 text{but}"))
        return nothing
    unprintable = _CONTROL.search(decoded)
    if unprintable is not None:
        line = decoded.count("\n", 0, unprintable.start()) + 1
        column = unprintable.start() - decoded.rfind("\n", 0, unprintable.start())
        message = f"is not text: it has a control character, {ord(unprintable[0]):#04x}"
        problems.append(Problem(line, column, "", message))
        return nothing
    try:
        if not _acceptable(decoded, problems):
            return nothing
        node = yaml.compose(decoded, Loader=_Loader)
        return nothing if node is None else _value(node, "", problems)
    except yaml.MarkedYAMLError as error:
        line, column = _place(error.problem_mark or error.context_mark)
        said = ", ".join(part for part in (error.context, error.problem) if part)
        if _is_tab(decoded, line, column):
            said = "a tab begins what is to be indented by spaces"
        problems.append(Problem(line, column, "", f"is not YAML: {said}"))
    except yaml.YAMLError as error:
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        problems.append(Problem(0, 0, "", f"is not YAML: {said}"))
    return nothing


def _is_tab(text: str, line: int, column: int) -> bool:
    """Say whether a tab stands at a place."""
    lines = text.splitlines()
    return 0 < line <= len(lines) and lines[line - 1][column - 1 : column] == "\t"


def _acceptable(text: str, problems: list[Problem]) -> bool:
    """Look through a document before it is built: no aliases, no deep nesting."""
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.AliasEvent):
            message = "aliases (`*name`) are not allowed in a policy file"
            problems.append(Problem(*_place(event.start_mark), "", message))
            return False
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > _MAX_DEPTH:
                message = f"is nested more than {_MAX_DEPTH} deep"
                problems.append(Problem(*_place(event.start_mark), "", message))
                return False
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
    return True


def _value(node: yaml.Node, path: str, problems: list[Problem]) -> Value:
    """Return a node as a value; adds what is wrong with it, up to a limit, to `problems`."""
    line, column = _place(node.start_mark)
    if isinstance(node, yaml.CollectionNode) and node.tag not in _COLLECTION_TAGS:
        _add(problems, Problem(line, column, path, f"has a tag that is not allowed: {node.tag}"))
    if isinstance(node, yaml.MappingNode):
        entries = _entries(node, path, problems)
        return Value(line, column, {e.key: e.value.plain for e in entries}, entries)
    if isinstance(node, yaml.SequenceNode):
        items = [
            _value(item, f"{path}[{position}]", problems)
            for position, item in enumerate(node.value)
        ]
        return Value(line, column, [item.plain for item in items], items=items)
    try:
        plain = yaml.SafeLoader("").construct_object(node, deep=True)
    except (yaml.YAMLError, ValueError) as error:
        said = error.problem if isinstance(error, yaml.MarkedYAMLError) else str(error)
        _add(problems, Problem(line, column, path, f"cannot be read: {said}"))
        plain = None
    return Value(line, column, plain)


def _entries(node: yaml.MappingNode, path: str, problems: list[Problem]) -> list[Entry]:
    entries: dict[str, Entry] = {}
    for key_node, value_node in node.value:
        line, column = _place(key_node.start_mark)
        if not isinstance(key_node, yaml.ScalarNode):
            _add(problems, Problem(line, column, path, "a key must be a plain word"))
            continue
        key = str(key_node.value)
        if key in entries:
            first = entries[key].line
            message = f"key {key!r} is given twice, first in line {first}"
            _add(problems, Problem(line, column, path, message))
            continue
        below = f"{path}.{key}" if path else key
        entries[key] = Entry(line, column, key, _value(value_node, below, problems))
    return list(entries.values())


def _place(mark: _Mark | None) -> tuple[int, int]:
    """Return line and column, counted from 1; 0 where YAML does not say."""
    return (mark.line + 1, mark.column + 1) if mark is not None else (0, 0)


def _add(problems: list[Problem], problem: Problem) -> None:
    """Add a problem unless there are so many already that nobody would read it."""
    if len(problems) < _MAX_PROBLEMS:
        problems.append(problem)
