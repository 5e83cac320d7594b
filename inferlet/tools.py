"""A tool, as a program sees it.

Does not cover calling it (`pie.inferlet.context`) or what it does (`pie.worker.programs.tools`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from pie.wire.programs import ToolFacts


@dataclass(frozen=True, slots=True)
class Tool:
    """Something that the operator lets programs call."""

    name: str
    description: str
    schema: Mapping[str, object]
    """JSON Schema of its arguments, an object."""


def tool_of(facts: ToolFacts) -> Tool:
    """Return what a host told of a tool."""
    return Tool(facts.name, facts.description, json.loads(facts.schema))
