"""Retention rules: which pages a rule is about, and what it says of them.

Covers selectors and actions as the policy file has them. Does not cover reading the file
(`pie.policies.loader`) or carrying rules out (`pie.policies.rule_book`).
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Literal, TypeVar, get_args

from pydantic import BeforeValidator, Field, WithJsonSchema

from pie.page.events import Part, Tier
from pie.page.key import PageKey
from pie.policies.patterns import is_of, takes_all_of
from pie.policies.prefixes import NO_PREFIXES, NamedPrefix, Prefixes, name_or_key
from pie.policies.retention import PageView, RetentionPolicy
from pie.policies.units import (
    Bytes,
    ModelPattern,
    PrefixName,
    Seconds,
    SessionPattern,
    TenantPattern,
    seconds_text,
)

MOST_HITS = 0xFFFF
"""Uses of a page are counted up to this."""
_T = TypeVar("_T")

TierName = Literal["device", "host", "disk", "pool-ram", "pool-disk", "pool-object"]
PartName = Literal["full", "window", "state"]


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _one_or_several(names: Iterable[str]) -> WithJsonSchema:
    one = {"enum": list(names)}
    return WithJsonSchema({"anyOf": [one, {"type": "array", "items": one, "minItems": 1}]})


TierNames = Annotated[
    list[TierName],
    Field(min_length=1),
    BeforeValidator(_listed),
    _one_or_several(get_args(TierName)),
]
PartNames = Annotated[
    list[PartName],
    Field(min_length=1),
    BeforeValidator(_listed),
    _one_or_several(get_args(PartName)),
]


class Selector:
    """Which pages a rule is about: those to which all of it applies.

    Args:
        tenant: The tag of a tenant's pages, or a pattern such as `8f*`; `""` is pages of no tenant.
        tier: One tier, or several.
        part: One part of pages, or several.
        prefix: A name from `prefixes`: all its pages. Or the key of a prefix's last page, in
            hexadecimal: that page, which no page before it leaves ahead of.
        hits: Pages used at least so often.
        session: The tag of a conversation's pages, or a pattern; `"?*"` is pages of any conversation.
        model: The root of a model in hexadecimal, or a pattern.
        age: Pages that have been in their tier for so long.
    """

    def __init__(
        self,
        *,
        tenant: TenantPattern | None = None,
        tier: TierNames | None = None,
        part: PartNames | None = None,
        prefix: PrefixName | None = None,
        hits: Annotated[int, Field(ge=1, le=MOST_HITS)] | None = None,
        session: SessionPattern | None = None,
        model: ModelPattern | None = None,
        age: Seconds | None = None,
    ) -> None:
        self.tenant = tenant
        self.session = session
        self.model = model
        self.age_s = age or 0.0
        self.tiers = _every(tier, {name.lower().replace("_", "-"): t for name, t in _TIERS.items()})
        self.parts = _every(part, {name.lower(): p for name, p in Part.__members__.items()})
        self.prefix_name, self.prefix = name_or_key(prefix)
        self.hits = hits or 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Selector) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __str__(self) -> str:
        words = (("tenant", self.tenant), ("session", self.session), ("model", self.model))
        said = [f"{name} is {word!r}" for name, word in words if word is not None]
        for name, members in (("tier", self.tiers), ("part", self.parts)):
            if members is not None:
                names = sorted(member.name.lower().replace("_", "-") for member in members)
                said.append(f"{name} is {' or '.join(names)}")
        if self.prefix is not None:
            said.append(f"the key is {self.prefix.hex()}")
        if self.prefix_name is not None:
            said.append(f"it begins with {self.prefix_name!r}")
        if self.hits:
            said.append(f"used {self.hits} times or more")
        if self.age_s:
            said.append(f"there for {seconds_text(self.age_s)}")
        return ", ".join(said) or "any page"

    def matches(self, page: PageView, prefixes: Collection[str] = ()) -> bool:
        """Say whether a page, which belongs to these named prefixes, is meant, however often it was used and however long it is there."""
        return (
            # Patterns cost most, and a call where there is none half of that.
            (self.tiers is None or page.tier in self.tiers)
            and (self.parts is None or page.part in self.parts)
            and (self.prefix is None or page.key == self.prefix)
            and (self.prefix_name is None or self.prefix_name in prefixes)
            and (self.tenant is None or is_of(self.tenant, page.tenant_tag))
            and (self.session is None or is_of(self.session, page.session_tag))
            and (self.model is None or is_of(self.model, page.model_root))
        )

    def told_by_key(self, prefixes: Mapping[str, NamedPrefix]) -> Selector:
        """Return the same selector, by its prefix's key where that is what the prefix's name stands for."""
        named = None if self.prefix_name is None else prefixes.get(self.prefix_name)
        if named is None or named.key is None:
            return self
        return self._but(prefix=named.key, prefix_name=None)

    def with_key(self, key: PageKey) -> Selector:
        """Return the same selector, of the page with another key."""
        return self._but(prefix=key)

    def anywhere(self) -> Selector:
        """Return the same selector, of any tier and part."""
        return self._but(tiers=None, parts=None)

    def only(self, tier: Tier, part: Part) -> Selector:
        """Return the same selector, of one tier and part."""
        return self._but(tiers=frozenset({tier}), parts=frozenset({part}))

    def _but(self, **changed: object) -> Selector:
        other = copy.copy(self)
        vars(other).update(changed)
        return other

    def covers(
        self, other: Selector, prefixes: Mapping[str, NamedPrefix] = NO_PREFIXES.named
    ) -> bool:
        """Say whether all that `other` means is certainly meant here too."""
        return (
            takes_all_of(self.tenant, other.tenant)
            and takes_all_of(self.session, other.session)
            and takes_all_of(self.model, other.model)
            and (self.tiers is None or (other.tiers is not None and other.tiers <= self.tiers))
            and (self.parts is None or (other.parts is not None and other.parts <= self.parts))
            and (self.prefix is None or self.prefix == other.prefix)
            and (self.prefix_name is None or _holds(prefixes, self.prefix_name, other.prefix_name))
            and self.hits <= other.hits
            and self.age_s <= other.age_s
        )


@dataclass(frozen=True, slots=True)
class Pin:
    """Pages that leave after all others.

    Args:
        max: Bytes in one tier that are kept so; where they are used up, who has not used its own for longest
            gives room to another tenant. All where None.
    """

    max: Bytes | None = None


@dataclass(frozen=True, slots=True)
class Ttl:
    """Pages that leave before all others once they have been unused for a time.

    Args:
        after: The time since the last use.
    """

    after: Seconds


@dataclass(frozen=True, slots=True)
class Quota:
    """A tenant whose pages take too much of a tier gives before all others, kept pages after its other ones.

    Args:
        max: Bytes that the pages of each tenant may take of one tier.
    """

    max: Bytes


@dataclass(frozen=True, slots=True)
class KeepSession:
    """A conversation's pages are kept for its next turn: they leave after all others.

    Args:
        keep: How long, since a page of the conversation was last used or came here.
        max: Bytes in one tier that are kept so; the conversation unused for longest gives its place.
    """

    keep: Seconds = 600.0
    max: Bytes | None = None


@dataclass(frozen=True, slots=True)
class PersistPrefix:
    """A prefix outlives restarts: its pages are written to disk at once, and leave after all others.

    Args:
        max: Bytes in one tier that are kept so; where they are used up, who has not used its own for longest
            gives room to another tenant. All where None.
    """

    max: Bytes | None = None


Action = Pin | Ttl | Quota | KeepSession | PersistPrefix

ACTIONS: Mapping[str, type[Action]] = {
    "pin": Pin,
    "ttl": Ttl,
    "quota": Quota,
    "keep-session": KeepSession,
    "persist-prefix": PersistPrefix,
}
"""What a rule can say, by name.

A page falls under the first `quota` that fits it, and under the first that fits it of all other rules.
"""


@dataclass(frozen=True, slots=True)
class Rule:
    """A selector and what is done with what it selects."""

    selector: Selector
    action_name: str
    action: Action

    @property
    def options(self) -> Mapping[str, object]:
        """What is set of the action's options."""
        return {name: value for name, value in asdict(self.action).items() if value is not None}


@dataclass(frozen=True, slots=True)
class Ruled:
    """A policy, and the rules that come before it once a manager has it."""

    policy: RetentionPolicy
    rules: tuple[Rule, ...]
    prefixes: Prefixes = NO_PREFIXES

    def stored(self, page: PageView, now_s: float) -> None:
        """Pass on to the policy."""
        self.policy.stored(page, now_s)

    def hit(self, key: PageKey, part: Part, now_s: float) -> None:
        """Pass on to the policy."""
        self.policy.hit(key, part, now_s)

    def removed(self, key: PageKey, part: Part) -> None:
        """Pass on to the policy."""
        self.policy.removed(key, part)

    def victims(self, bytes_needed: int, now_s: float) -> Iterable[tuple[PageKey, Part]]:
        """Ask the policy alone."""
        return self.policy.victims(bytes_needed, now_s)


def covering(
    earlier: Sequence[Selector], selector: Selector, prefixes: Mapping[str, NamedPrefix]
) -> list[int]:
    """Return the numbers of those that leave nothing to `selector`, one or together; none where they leave some.

    Args:
        earlier: The selectors before it.
        selector: Whose pages they may take.
        prefixes: Those that selectors may name.
    """
    selector = selector.told_by_key(prefixes)
    known = [one.told_by_key(prefixes) for one in earlier]
    first = next((n for n, one in enumerate(known) if one.covers(selector, prefixes)), None)
    if first is not None:
        return [first]
    # In each tier and of each part another one may.
    anywhere = [n for n, one in enumerate(known) if one.anywhere().covers(selector, prefixes)]
    found: set[int] = set()
    for tier in selector.tiers or Tier:
        for part in selector.parts or Part:
            cell = selector.only(tier, part)
            taking = next((n for n in anywhere if known[n].covers(cell, prefixes)), None)
            if taking is None:
                return []
            found.add(taking)
    return sorted(found)


_TIERS = Tier.__members__


def _every(names: Iterable[str] | None, members: Mapping[str, _T]) -> frozenset[_T] | None:
    return None if names is None else frozenset(members[name] for name in names)


def _holds(prefixes: Mapping[str, NamedPrefix], name: str, other: str | None) -> bool:
    """Say whether all pages of another prefix are certainly those of the one called `name`."""
    if name == other:
        return True
    one, two = prefixes.get(name), None if other is None else prefixes.get(other)
    return one is not None and two is not None and one.begins_with(two)
