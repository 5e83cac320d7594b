"""Requests that become forks of another one, which computes the prompt of them all.

Covers who waits for whom. Does not cover how a working set is forked (`pie.worker.working_set`) or
when a fork runs (`pie.worker.scheduler`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pie.worker.generation import Generation, RequestKey


class Forks:
    """Waiting forks by their parent, in order of arrival."""

    def __init__(self) -> None:
        self._children: dict[RequestKey, list[Generation]] = {}
        self._parents: dict[RequestKey, RequestKey] = {}

    def __len__(self) -> int:
        return len(self._parents)

    def add(self, parent: Generation, child: Generation) -> None:
        """Let `child` wait until the prompt of `parent` is computed."""
        # A fork that waits itself computes nothing: its parent does.
        key = self._parents.get(parent.key, parent.key)
        self._children.setdefault(key, []).append(child)
        self._parents[child.key] = key

    def of(self, parent: Generation) -> tuple[Generation, ...]:
        """Return those that wait for `parent`."""
        return tuple(self._children.get(parent.key, ()))

    def take(self, parent: Generation) -> tuple[Generation, ...]:
        """Return those that wait for `parent`, which wait no longer."""
        children = tuple(self._children.pop(parent.key, ()))
        for child in children:
            del self._parents[child.key]
        return children

    def remove(self, child: Generation) -> None:
        """Forget a fork that has ended while it waited; does nothing for others."""
        parent = self._parents.pop(child.key, None)
        if parent is None:
            return
        children = self._children[parent]
        children.remove(child)
        if not children:
            del self._children[parent]

    def waiting(self) -> Iterator[Generation]:
        """List all that wait."""
        for children in self._children.values():
            yield from children


def parent_of(generation: Generation, others: Mapping[RequestKey, Generation]) -> Generation | None:
    """Return which of `others` a request is to be forked off; None where it goes its own way."""
    fork_of = generation.request.fork_of
    parent = None if fork_of is None else others.get((generation.owner, fork_of))
    if parent is None or not parent.is_first:
        return None
    same = generation.sequence.working_set.is_twin_of(parent.sequence.working_set)
    return parent if same else None
