"""Small pages for tests of policies: a key is a number."""

from pie.page.events import Part, Tier
from pie.page.key import PageKey
from pie.policies.retention import PageView


def key(number: int) -> PageKey:
    return PageKey(number.to_bytes(4, "big"))


def number(page: tuple[PageKey, Part]) -> int:
    return int.from_bytes(page[0], "big")


def view(at: int, parent: int | None = None, *, size: int = 1, part: Part = Part.FULL) -> PageView:
    before = key(parent) if parent is not None else b"root"
    return PageView(key(at), before, 0, part, Tier.DEVICE, size)
