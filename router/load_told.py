"""Why pages were loaded or computed, as an answer's header tells it.

Covers the text of `x-pie-load`, a list of items with parameters (RFC 8941). Does not cover the
decision (`pie.worker.load_choice`).
"""

from __future__ import annotations

from pie.wire.messages import LoadSource, Started


def told_load(started: Started | None) -> str:
    """Return one item for each tier that was looked at; nothing where none was."""
    if started is None or started.load is None:
        return ""
    told = ", ".join(map(_item, started.load.sources))
    return f"{told};overran" if started.load.overran else told


def _item(source: LoadSource) -> str:
    item = (
        f"{source.tier};pages={source.pages};load-ms={source.load_ms:.1f}"
        f";compute-ms={source.compute_ms:.1f}"
    )
    if not source.chosen:
        return item
    return f"{item};loaded={source.loaded_pages};took-ms={source.took_ms:.1f}"
