"""What an HTTP server answered.

Does not cover asking (`pie.inferlet.context`) or what is granted (`pie.worker.programs.web`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """An answer, of whatever status: redirects and errors of the server too."""

    status: int
    headers: Mapping[str, str]
    """By name in lower case; what came several times is joined by commas."""
    body: bytes
    """As it came."""

    @property
    def text(self) -> str:
        """The body as UTF-8; bytes that are none of it are replaced."""
        return self.body.decode("utf-8", "replace")

    def json(self) -> object:
        """Return what the body says as JSON.

        Raises:
            ValueError: It is no JSON.
        """
        found: object = json.loads(self.body)
        return found
