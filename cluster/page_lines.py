"""Pages at rest, as `pie pages` tells them.

Covers a line for each, as text and as JSON. Does not cover finding them (`pie.cluster.page_tools`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

import msgspec

from pie.cluster.page_tools import Found, Holder
from pie.page.errors import BadPage
from pie.page.format import HEAD_BYTES
from pie.pool.at_rest import may_be_of_another_secret

HEADING = (
    f"{'key':<16}  {'part':<6}  {'tokens':>7}  {'bytes':>10}  {'on disk':>10}  {'age':>7}  where"
)

FOREIGN_HINT = "what was written with another secret, or without one, is read with that one: give --secret FILE"

_AGES = ((86_400, "d"), (3_600, "h"), (60, "min"))


class PageLine(msgspec.Struct, frozen=True, kw_only=True):
    """A page at rest, as it is told."""

    source: str
    tier: str
    where: str
    file_bytes: int
    age_s: float
    key: str = ""
    part: str = ""
    model_root: str = ""
    parent: str = ""
    index: int = 0
    tokens: int = 0
    """Of its sequence, up to its end."""
    page_tokens: int = 0
    dtype: str = ""
    layout_id: str = ""
    raw_bytes: int = 0
    tenant_tag: str = ""
    key_id: str = ""
    """Which key it is encrypted with; empty where it is not."""
    codec: str = ""
    """How it is packed; empty where that was not looked at."""
    problem: str = ""


def line_of(one: Found, problem: str = "") -> PageLine:
    """Return what is told of a page."""
    at, page = one
    header = page.header
    common = PageLine(
        source=at.source.name,
        tier=at.source.tier,
        where=page.where,
        file_bytes=page.file_bytes,
        age_s=max(0.0, time.time() - page.stored_ns / 1e9),
        key_id=page.key_id.hex() if page.key_id else "",
        problem=problem or page.problem,
    )
    if header is None:
        return common
    return msgspec.structs.replace(
        common,
        key=header.key.hex(),
        part=header.part.name.lower(),
        model_root=header.model_root.hex(),
        parent=header.parent.hex(),
        index=header.index,
        tokens=(header.index + 1) * header.page_tokens,
        page_tokens=header.page_tokens,
        dtype=header.dtype,
        layout_id=header.layout_id,
        raw_bytes=header.raw_bytes,
        tenant_tag=header.tenant_tag,
    )


def looked_at(one: Found, problem: str) -> PageLine:
    """Return what is told of a page, with what only its own header says."""
    line = line_of(one, problem)
    try:
        head = one.at.source.read(one.page)[:HEAD_BYTES]
        codec = one.at.sealing.open_head(head, one.page.file_bytes).codec.value
    except (BadPage, OSError):
        return line
    return msgspec.structs.replace(line, codec=codec)


def row(line: PageLine) -> str:
    """Return a line of a listing."""
    key, part, tokens, size = line.key[:16], line.part, str(line.tokens), str(line.raw_bytes)
    mark = f"  encrypted with {line.key_id}" if line.key_id else ""
    if not line.key:
        key = part = tokens = size = "-"
        mark = f": {line.problem}"
    return (
        f"{key:<16}  {part:<6}  {tokens:>7}  {size:>10}  {line.file_bytes:>10}  "
        f"{age(line.age_s):>7}  {line.source}/{line.where}{mark}"
    )


def card(line: PageLine) -> str:
    """Return all that is known of a page, a line for each field."""
    fields = msgspec.structs.asdict(line) | {"age": age(line.age_s)}
    del fields["age_s"]
    fields["problem"] = line.problem or "none"
    told = (f"{name:<12}{value}" for name, value in fields.items() if value or name == "index")
    return "\n".join(told)


def held(holders: Sequence[Holder] | None) -> str:
    """Return who holds a page in a running cluster."""
    if holders is None:
        return "no index of a running cluster answers"
    lines = []
    for one in holders:
        parts = (f"{part} in {' and '.join(tiers)}" for part, tiers in one.parts.items())
        lines.append(f"{one.place:<12}holds {', '.join(parts)}")
    return "\n".join(lines) or "nobody in the running cluster holds it"


class Sums:
    """What a listing adds up to."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, line: PageLine) -> None:
        """Count a line."""
        self._counts["bad" if line.problem else "pages"] += 1
        self._counts["unread"] += may_be_of_another_secret(line.problem)
        self._counts["raw"] += line.raw_bytes
        self._counts["file"] += line.file_bytes

    def __str__(self) -> str:
        counts = self._counts
        bad = f", {counts['bad']} that cannot be read" if counts["bad"] else ""
        return (
            f"{counts['pages']} pages{bad}; {counts['raw']} bytes of pages in {counts['file']} bytes "
            "of files" + (f"\n{FOREIGN_HINT}" if counts["unread"] else "")
        )


def age(age_s: float) -> str:
    """Return an age in its largest unit."""
    for unit_s, name in _AGES:
        if age_s >= unit_s:
            return f"{age_s / unit_s:.0f} {name}"
    return f"{age_s:.0f} s"


def as_json(line: PageLine) -> str:
    """Return a line as JSON."""
    return msgspec.json.encode(line).decode()
