"""Where commands print, and the tables that they print.

Covers that nothing is cut or wrapped where no terminal shows it, such as for `grep` or a file. Does not cover
what is printed.
"""

from __future__ import annotations

import sys
from collections.abc import Collection

from rich.console import Console
from rich.table import Table

_NO_LIMIT = 1 << 16
"""Columns that no line has. Rich takes 80 where it knows none."""


def printer(*, highlight: bool = False) -> Console:
    """Return what prints to standard output: as wide as the terminal, or as lines are long where it is none.

    Text is printed as it is: brackets are no markup.

    Args:
        highlight: Colour numbers and names in a terminal.
    """
    if sys.stdout.isatty():
        return Console(highlight=highlight, markup=False)
    return Console(highlight=highlight, markup=False, width=_NO_LIMIT, soft_wrap=True)


def new_table(*headings: str, left: Collection[str] = (), no_wrap: bool = False) -> Table:
    """Return an empty table without lines.

    Args:
        headings: Of its columns.
        left: Those whose columns hold text and stand left; the first always does, others hold numbers.
        no_wrap: In a terminal that is too narrow let columns be cut rather than wrapped.
    """
    new = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for at, heading in enumerate(headings):
        is_left = not at or heading in left
        new.add_column(
            heading,
            justify="left" if is_left else "right",
            no_wrap=no_wrap,
            overflow="ellipsis" if no_wrap else "fold",
        )
    return new
