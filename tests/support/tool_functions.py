"""Functions that tests grant to programs as tools."""

from __future__ import annotations

import threading
from typing import Literal

GO_ON = threading.Event()


def weather(place: str, unit: Literal["C", "F"] = "C") -> dict[str, object]:
    """Say how the weather is at a place."""
    return {"place": place, "unit": unit, "thread": threading.current_thread().name}


async def double(numbers: list[int]) -> list[int]:
    """Double numbers."""
    return [2 * one for one in numbers]


def broken() -> str:
    raise RuntimeError("no oil")


def hangs() -> None:
    GO_ON.wait(60)


def unclear(place) -> str:  # type: ignore[no-untyped-def]
    return str(place)


def many(*places: str) -> str:
    return " ".join(places)


def large() -> str:
    return "x" * 5000


def not_json() -> object:
    return object()
