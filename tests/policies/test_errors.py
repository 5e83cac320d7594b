"""The tree of errors is drawn whole."""

from __future__ import annotations

from pie.policies import errors, registry, user_code
from pie.policies.errors import PolicyError


def named(error: type[BaseException]) -> set[str]:
    """Return the names of all of our kinds of an error."""
    ours = [kind for kind in error.__subclasses__() if kind.__module__.startswith("pie.")]
    return {error.__name__}.union(*map(named, ours))


def test_every_error_of_policies_is_in_the_tree() -> None:
    names = named(PolicyError)
    assert {registry.UnknownPolicyError.__name__, user_code.LateError.__name__} < names
    drawn = (errors.__doc__ or "").split("\n\n")[1].split()
    assert names <= set(drawn)
