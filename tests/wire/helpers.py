"""What tests of the wire share: page headers, waiting, and servers in processes of their own."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable

from pie.page.events import Part
from pie.page.header import PageHeader, checksum
from pie.page.key import PageKey, RootKey

WAIT_S = 60.0
"""Longest wait for anything here; only a failing test waits so long."""


def header_of(payload: bytes, key: bytes = b"k") -> PageHeader:
    return PageHeader(
        key=PageKey(key),
        parent=b"p",
        index=0,
        part=Part.FULL,
        model_root=RootKey(b"r"),
        dtype="float32",
        layout_id="layout",
        page_tokens=16,
        raw_bytes=len(payload),
        checksum=checksum(payload),
    )


async def eventually(condition: Callable[[], object]) -> None:
    """Wait until a condition holds."""
    end_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end_s, f"did not come true within {WAIT_S:g} s"
        await asyncio.sleep(0.005)


def start_process(*arguments: str) -> subprocess.Popen[str]:
    """Run `other_end.py` in a process of its own; it prints a line when it is ready."""
    command = [sys.executable, "-m", "tests.wire.other_end", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


async def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return (await asyncio.to_thread(process.stdout.readline)).strip()
