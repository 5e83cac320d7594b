"""`replicate`: so many pool nodes keep what a selector means.

Covers one built-in cluster policy. A selector goes by what a router knows of the prompts that hold a group of
pages: whose they are, of which conversation and model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Annotated

from pydantic import Field

from pie.page.key import PageKey
from pie.policies.cluster_policy import ClusterView, GroupView, Order, SetCopies
from pie.policies.patterns import is_of
from pie.policies.prefixes import name_or_key
from pie.policies.units import ModelPattern, NonNegative, PrefixName, SessionPattern, TenantPattern


class Replicate:
    """So many pool nodes keep the groups of pages that a selector means.

    Args:
        copies: How many.
        tenant: Groups that this tenant's prompts have, by its tag or a pattern; `""` is no tenant.
        session: Groups of the conversation with this tag, or a pattern; `"?*"` is any conversation.
        model: Groups of the model with this root in hexadecimal, or a pattern.
        prefix: A name from `prefixes`: the groups of its pages, each tenant's. Or a key in hexadecimal: the group of the
            page with this key, and all before it.
        uses: Only groups that prompts use so many times a second.
    """

    def __init__(
        self,
        copies: Annotated[int, Field(ge=2, le=64)],
        *,
        tenant: TenantPattern | None = None,
        session: SessionPattern | None = None,
        model: ModelPattern | None = None,
        prefix: PrefixName | None = None,
        uses: NonNegative = 0.0,
    ) -> None:
        self._copies = copies
        self._tenant = tenant
        self._session = session
        self._model = model
        self._prefix_name, self._prefix = name_or_key(prefix)
        self._uses = uses

    def decide(self, view: ClusterView) -> Iterable[Order]:
        """Order the number for what is meant, and the usual number for what no longer is."""
        wanted = min(self._copies, view.nodes)
        of_prefix = self._groups_of_prefix(view)
        for one in view.groups:
            of_it = of_prefix is None or one.group in of_prefix or self._prefix_name in one.prefixes
            meant = of_it and self._is_meant(one)
            if meant and one.copies < wanted and one.uses_per_s >= self._uses:
                yield SetCopies(one.group, wanted, "the selector means it")
            # Below half of it, so that a group at the edge does not come and go.
            elif one.copies > view.least_copies and not (
                meant and one.uses_per_s >= self._uses / 2
            ):
                reason = "the selector means it no longer"
                yield SetCopies(one.group, view.least_copies, reason)

    def _groups_of_prefix(self, view: ClusterView) -> Collection[PageKey] | None:
        """Return the pages of the prefix, with all of its last group; None where any is meant."""
        last = self._prefix
        if self._prefix_name is not None:
            named = view.prefixes.get(self._prefix_name)
            if named is None or named.last is None:
                return () if named is None else named.pages
            last = named.last
        if last is None:
            return None
        shortest: set[PageKey] = set()
        for one in view.groups:
            if last in one.chain and (not shortest or len(one.chain) < len(shortest)):
                shortest = set(one.chain)
        return shortest

    def _is_meant(self, one: GroupView) -> bool:
        return (
            is_of(self._tenant, one.tenant_tag)
            and is_of(self._session, one.session_tag)
            and is_of(self._model, one.model_root)
        )
