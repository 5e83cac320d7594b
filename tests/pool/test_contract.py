"""What the storage contract may depend on."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import pie.pool

FOLDER = Path(next(iter(pie.pool.__path__)))


@pytest.mark.parametrize("name", ["tier", "ram", "cache", "checksum", "wrappers", "conformance"])
def test_storage_knows_nothing_of_the_wire(name: str) -> None:
    tree = ast.parse((FOLDER / f"{name}.py").read_text())
    imported = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not {module for module in imported if module.startswith("pie.wire")}
