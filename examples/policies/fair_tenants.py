"""A retention policy: the tenant whose pages take most gives first."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from pie.page.events import Part
from pie.page.key import PageKey
from pie.policies.retention import PageView

Page = tuple[PageKey, Part]


class FairTenants:
    """The tenant with the most bytes gives its page that was unused for longest."""

    def __init__(self) -> None:
        self._tenant_of: dict[Page, str] = {}
        self._sizes: dict[Page, int] = {}
        self._pages: dict[str, dict[Page, None]] = {}
        self._bytes: dict[str, int] = {}

    def stored(self, page: PageView, now_s: float) -> None:
        """Count a page for its tenant."""
        name, tenant = (page.key, page.part), page.tenant_tag
        self._tenant_of[name], self._sizes[name] = tenant, page.bytes
        self._pages.setdefault(tenant, {})[name] = None
        self._bytes[tenant] = self._bytes.get(tenant, 0) + page.bytes

    def hit(self, key: PageKey, part: Part, now_s: float) -> None:
        """Put a page behind the tenant's others."""
        pages = self._pages[self._tenant_of[key, part]]
        del pages[key, part]
        pages[key, part] = None

    def removed(self, key: PageKey, part: Part) -> None:
        """Count a page no more, and forget a tenant that has none."""
        name = (key, part)
        tenant = self._tenant_of.pop(name)
        del self._pages[tenant][name]
        self._bytes[tenant] -= self._sizes.pop(name)
        if not self._pages[tenant]:
            del self._pages[tenant], self._bytes[tenant]

    def victims(self, bytes_needed: int, now_s: float) -> Iterator[Page]:
        """Propose pages, always of the tenant that would have most by then."""
        most = [(-size, tenant) for tenant, size in self._bytes.items()]
        heapq.heapify(most)
        left = {tenant: iter(pages) for tenant, pages in self._pages.items()}
        while most:
            size, tenant = heapq.heappop(most)
            page = next(left[tenant], None)
            if page is not None:
                yield page
                heapq.heappush(most, (size + self._sizes[page], tenant))
