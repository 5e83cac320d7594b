"""Request ids."""

from __future__ import annotations

import itertools
import secrets

_PREFIX = secrets.token_hex(6)
_NUMBERS = itertools.count(1)


def new_request_id() -> str:
    """Return an id that no other call in any process returns."""
    return f"{_PREFIX}-{next(_NUMBERS):x}"
