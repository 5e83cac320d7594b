"""A function as a program that can be sent somewhere: its text, and what it is called.

Covers finding the text. Does not cover sending it (`pie.inferlet.client`).
"""

from __future__ import annotations

import inspect
import linecache
import textwrap
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from pie.inferlet.errors import BadCallError

ProgramFunction = Callable[..., Awaitable[object]]


@dataclass(frozen=True, slots=True)
class Upload:
    """A program to send."""

    name: str
    source: str
    entry: str


def upload_of(function: ProgramFunction) -> Upload:
    """Return a function as a program: the whole file that it stands in, so that what it uses comes along.

    Where there is no file, as in a notebook, the function's own text must be enough.

    Raises:
        BadCallError: It is no `async def` of a module, or its text cannot be had.
    """
    name = getattr(function, "__name__", "")
    if not inspect.iscoroutinefunction(function) or function.__qualname__ != name:
        raise BadCallError("a program is an `async def` at the top of a file, not inside anything")
    try:
        file = inspect.getsourcefile(function) or ""
        if Path(file).is_file():
            return Upload(Path(file).name, "".join(linecache.getlines(file)), name)
        return Upload(f"{name}.py", textwrap.dedent(inspect.getsource(function)), name)
    except (OSError, TypeError) as error:
        raise BadCallError(f"the text of {name} cannot be found: write it into a file") from error
