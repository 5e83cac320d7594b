"""`expire`: pages of conversations that nobody has gone on with for long leave everywhere.

Covers one built-in cluster policy. It knows the conversations that the router which asks has seen since it
started; what should leave by its age alone, wherever it is, is for the rule `ttl`.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable

from pie.page.events import PlaceKind
from pie.policies.cluster_policy import ClusterView, LetGo, Order
from pie.policies.units import Seconds, SessionPattern, TenantPattern


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
        """Return orders to let go of what no other conversation has."""
        for session in view.sessions:
            if session.idle_s < self._after_s or not self._is_meant(
                session.tenant_tag, session.session
            ):
                continue
            reason = f"conversation {session.session} is idle for {session.idle_s:.0f} s"
            holders = [place for place, held in session.held.items() if held > session.shared]
            if self._pool and session.pooled > session.shared:
                holders += [one.place for one in view.places if one.kind is PlaceKind.POOL]
            for place in holders:
                yield LetGo(
                    place, session.pages, reason, start=session.shared, also_last=self._pool
                )

    def _is_meant(self, tenant_tag: str, session: str) -> bool:
        return (self._tenant is None or fnmatch.fnmatchcase(tenant_tag, self._tenant)) and (
            self._session is None or fnmatch.fnmatchcase(session, self._session)
        )
