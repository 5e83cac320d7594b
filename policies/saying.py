"""Policies and their options as a policy file would say them.

Covers a line of text for each option, in the units that the file takes. Does not cover who prints it
(`pie.cluster.policy_command`).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

import yaml

from pie.policies.options import marked
from pie.policies.units import Unit


def said(kind: type[object], options: Mapping[str, object]) -> Mapping[str, str]:
    """Return the values of a policy's or an action's options, each in one line that a file takes."""
    units = marked(kind, Unit)
    return {name: _said(value, units.get(name)) for name, value in options.items()}


def _said(value: object, unit: Unit | None) -> str:
    if unit is not None and isinstance(value, (int, float)):
        return unit.text(value)
    try:
        text = _yaml(_plain(value), None)
        # Line breaks in a text are escaped in quotes alone.
        return text if len(text.splitlines()) == 1 else _yaml(_plain(value), '"')
    except yaml.YAMLError:  # what a class made of it, which no file has
        return repr(value)


def _yaml(value: object, style: str | None) -> str:
    text: str = yaml.safe_dump(
        value,
        default_flow_style=True,
        default_style=style,
        allow_unicode=True,
        width=sys.maxsize,
    )
    return text.removesuffix("\n").removesuffix("\n...")


def _plain(value: object) -> object:
    """Return lists for what a class takes as tuples or sets, and mappings of such."""
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(one) for one in value]
    return value
