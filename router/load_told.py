"""Why pages were loaded or computed, as an answer's header tells it.

Covers the text of `x-pie-load`, a list of items with parameters (RFC 8941). Does not cover the
decision (`pie.worker.load_choice`).
"""

from __future__ import annotations

from pie.wire.messages import LoadSource, Started

_MOST_ITEMS = 16
"""Clients refuse headers of some kilobytes; an item has 80 characters or so."""


def told_load(started: Started | None) -> str:
    """Return an item for each run of pages that was looked at; nothing where there was none."""
    if started is None or started.load is None:
        return ""
    sources = started.load.sources
    told = ", ".join(map(_item, sources[:_MOST_ITEMS]))
    if len(sources) > _MOST_ITEMS:
        told += f", more;runs={len(sources) - _MOST_ITEMS}"
    return f"{told};overran" if started.load.overran else told


def _item(source: LoadSource) -> str:
    item = (
        f"{source.tier};pages={source.pages};load-ms={source.load_ms:.1f}"
        f";compute-ms={source.compute_ms:.1f}"
    )
    if not source.chosen:
        return item
    return f"{item};loaded={source.loaded_pages};took-ms={source.took_ms:.1f}"
