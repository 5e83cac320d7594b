"""A retention policy: the tenant whose pages take most gives first."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from pie.page.events import Part
from pie.page.key import PageKey
from pie.policies.retention import PageView
from pie.policies.scored import PageUse, ScoredRetention

Page = tuple[PageKey, Part]


class LatestUse(ScoredRetention):
    """One tenant's pages, the one unused for longest first."""

    def score(self, page: PageView, use: PageUse, now_s: float) -> float:
        """Return when a page was last used."""
        return use.used_s


class FairTenants:
    """The tenant with the most bytes gives its page that was unused for longest."""

    def __init__(self) -> None:
        self._held: dict[Page, PageView] = {}
        self._pages: dict[str, LatestUse] = {}
        self._bytes: dict[str, int] = {}

    def stored(self, page: PageView, now_s: float) -> None:
        """Count a page for its tenant."""
        tenant = page.tenant_tag
        self._held[page.key, page.part] = page
        self._pages.setdefault(tenant, LatestUse()).stored(page, now_s)
        self._bytes[tenant] = self._bytes.get(tenant, 0) + page.bytes

    def hit(self, key: PageKey, part: Part, now_s: float) -> None:
        """Tell it of the page's tenant, whoever used it."""
        self._pages[self._held[key, part].tenant_tag].hit(key, part, now_s)

    def removed(self, key: PageKey, part: Part) -> None:
        """Count a page no more, and forget a tenant that has none."""
        page = self._held.pop((key, part))
        tenant = page.tenant_tag
        self._pages[tenant].removed(key, part)
        self._bytes[tenant] -= page.bytes
        if not self._bytes[tenant]:
            del self._pages[tenant], self._bytes[tenant]

    def victims(self, bytes_needed: int, now_s: float) -> Iterator[Page]:
        """Propose pages, always of the tenant that would have most by then."""
        most = [(-size, tenant) for tenant, size in self._bytes.items()]
        heapq.heapify(most)
        left = {tenant: iter(pages.victims(0, now_s)) for tenant, pages in self._pages.items()}
        while most:
            size, tenant = heapq.heappop(most)
            page = next(left[tenant], None)
            if page is not None:
                yield page
                heapq.heappush(most, (size + self._held[page].bytes, tenant))
