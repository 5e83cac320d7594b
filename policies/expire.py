"""`expire`: pages of conversations that nobody has gone on with for long leave everywhere.

Covers one built-in cluster policy. It knows the conversations that the router which asks has seen since it
started, and the prompts that are asked often, of which it leaves the pages; what should leave by its age alone, wherever it is, is for the rule `ttl`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pie.page.events import PlaceKind
from pie.page.key import PageKey
from pie.policies.cluster_policy import ClusterView, LetGo, Order, SessionView
from pie.policies.patterns import is_of
from pie.policies.units import Seconds, SessionPattern, TenantPattern

_LATELY_USES_PER_S = 0.02
"""Of a group that is used less nobody is known to need it; one use counts as more for a quarter of a minute."""


class Expire:
    """Pages of conversations that nobody has gone on with leave workers and the pool.

    Args:
        after: The time since the end of its latest answer.
        tenant: Only conversations of this tenant's tag, or a pattern; `""` is those of no tenant.
        session: Only the conversation with this tag, or a pattern.
        pool: Whether pages leave the pool too.
    """

    def __init__(
        self,
        after: Seconds,
        *,
        tenant: TenantPattern | None = None,
        session: SessionPattern | None = None,
        pool: bool = True,
    ) -> None:
        self._after_s = after
        self._tenant = tenant
        self._session = session
        self._pool = pool

    def decide(self, view: ClusterView) -> Iterable[Order]:
        """Return orders to let go of what no other conversation has, and no other prompt had lately."""
        lately = _lately_used(view)
        for session in view.sessions:
            if session.idle_s < self._after_s or not self._is_meant(session):
                continue
            reason = f"conversation {session.session} is idle for {session.idle_s:.0f} s"
            shared = max(session.shared, _used_by_others(session, lately))
            holders = [place for place, held in session.held.items() if held > shared]
            if self._pool and session.pooled > shared:
                holders += [one.place for one in view.places if one.kind is PlaceKind.POOL]
            for place in holders:
                yield LetGo(place, session.pages, reason, start=shared, also_last=self._pool)

    def _is_meant(self, one: SessionView) -> bool:
        return is_of(self._tenant, one.tenant_tag) and is_of(self._session, one.session)


def _lately_used(view: ClusterView) -> dict[PageKey, set[str]]:
    """Return pages that prompts had lately, with the conversations of those that had them last."""
    found: dict[PageKey, set[str]] = {}
    for group in view.groups:
        if group.uses_per_s >= _LATELY_USES_PER_S:
            for page in group.chain:
                found.setdefault(page, set()).add(group.session_tag)
    return found


def _used_by_others(session: SessionView, lately: Mapping[PageKey, set[str]]) -> int:
    """Return how many leading pages of a conversation others had lately, named or not."""
    own = {session.session}
    count = 0
    for page in session.pages:
        if not lately.get(page, own) - own:
            break
        count += 1
    return count
