"""Where a text ends because it holds a stop string.

Covers several stop strings in text that arrives in pieces. Does not cover stop tokens (the
sampler's) or what a finish reason is called (the router's).

The match is the one that is complete first; of several that are complete at the same character,
the longest. So the result does not depend on how the text was cut into pieces. The automaton is
that of Aho and Corasick (1975): its depth is the length of the longest end of the text that may
begin a stop string, which is exactly what has to be held back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class StopResult:
    """What one piece of text led to."""

    text: str
    """What may be shown now. It never holds a stop string or the beginning of one."""
    matched: str | None = None
    """The stop string that ended the text; nothing is shown after it."""


@dataclass(slots=True)
class _Node:
    """One prefix of a stop string."""

    depth: int = 0
    children: dict[str, _Node] = field(default_factory=dict)
    fallback: _Node | None = None
    """The longest proper end of this prefix that is itself a prefix; none at the root."""
    stop: str | None = None
    """The longest stop string that ends here."""


class StopMatcher:
    """Finds the first of several stop strings in text that arrives in pieces.

    Linear in the text's length, whatever the stop strings. After a match it takes no more text.
    To go on with a text elsewhere, push what there was of it and drop the result.

    Args:
        stops: The stop strings; none lets everything through.

    Raises:
        ValueError: A stop string is empty.
    """

    def __init__(self, stops: Iterable[str] = ()) -> None:
        self.stops = tuple(dict.fromkeys(stops))
        self._root = _automaton(self.stops)
        self._node = self._root
        self._held = ""
        self._matched: str | None = None

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._matched

    def push(self, text: str) -> StopResult:
        """Take a piece of text and return what may be shown of it and of what was held back."""
        if self._matched is not None:
            return StopResult("", self._matched)
        if not self.stops:
            return StopResult(text)
        seen = self._held + text
        node, root = self._node, self._root
        for at, char in enumerate(text, start=len(self._held) + 1):
            while (child := node.children.get(char)) is None:
                if node.fallback is None:
                    break
                node = node.fallback
            node = child if child is not None else root
            if node.stop is not None:
                self._matched, self._held, self._node = node.stop, "", root
                return StopResult(seen[: at - len(node.stop)], node.stop)
        self._node = node
        cut = len(seen) - node.depth
        self._held = seen[cut:]
        return StopResult(seen[:cut])

    def flush(self) -> str:
        """Return what was held back: the text has ended without a match."""
        held, self._held, self._node = self._held, "", self._root
        return held


def _automaton(stops: Iterable[str]) -> _Node:
    """Build the automaton of Aho and Corasick and return its root."""
    root = _Node()
    for stop in stops:
        if not stop:
            raise ValueError("A stop string must not be empty.")
        node = root
        for char in stop:
            node = node.children.setdefault(char, _Node(node.depth + 1))
        node.stop = stop
    queue = deque(root.children.values())
    for child in queue:
        child.fallback = root
    while queue:
        node = queue.popleft()
        for char, child in node.children.items():
            at = node.fallback
            while at is not None and char not in at.children:
                at = at.fallback
            child.fallback = at.children[char] if at is not None else root
            # A prefix that is itself a stop string is longer than any that ends within it.
            if child.stop is None:
                child.stop = child.fallback.stop
            queue.append(child)
    return root
