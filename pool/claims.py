"""Who said that it would send which page.

Covers claims: the first writer that is told to send a page keeps others from sending the same
bytes, until it has sent it, goes away or takes too long. Pure; time comes in. Does not cover
stores in progress (`pie.pool.tier`), which need no claim: whoever brings the bytes first wins.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from pie.pool.tier import PageId


@dataclass(frozen=True, slots=True)
class _Claim:
    writer: bytes
    until_s: float


class Claims:
    """Claims on pages, a bounded number, each for a limited time."""

    def __init__(self, timeout_s: float, *, limit: int = 65_536) -> None:
        self._timeout_s = timeout_s
        self._limit = limit
        self._claims: OrderedDict[PageId, _Claim] = OrderedDict()
        """In the order in which they end, since all last equally long."""
        self._pages: dict[bytes, set[PageId]] = {}

    def __len__(self) -> int:
        return len(self._claims)

    def take(self, page: PageId, writer: bytes, now_s: float) -> bool:
        """Give `page` to `writer` unless another has it or there are too many claims.

        A writer that asks again starts anew.
        """
        self.expire(now_s)
        claim = self._claims.get(page)
        if claim is not None:
            if claim.writer != writer:
                return False
            self.end(page)
        if len(self._claims) >= self._limit:
            return False
        self._claims[page] = _Claim(writer, now_s + self._timeout_s)
        self._pages.setdefault(writer, set()).add(page)
        return True

    def is_taken(self, page: PageId, now_s: float) -> bool:
        """Say whether some writer has `page`."""
        claim = self._claims.get(page)
        return claim is not None and claim.until_s > now_s

    def end(self, page: PageId) -> None:
        """End the claim on `page`, whoever has it: it was sent or given up."""
        claim = self._claims.pop(page, None)
        if claim is not None:
            pages = self._pages[claim.writer]
            pages.remove(page)
            if not pages:
                del self._pages[claim.writer]

    def writer_gone(self, writer: bytes) -> None:
        """End all claims of a writer."""
        for page in list(self._pages.get(writer, ())):
            self.end(page)

    def expire(self, now_s: float) -> None:
        """End the claims whose time is up."""
        while self._claims:
            page, claim = next(iter(self._claims.items()))
            if claim.until_s > now_s:
                return
            self.end(page)

    def check(self) -> None:
        """Assert that both tables agree."""
        assert len(self._claims) <= self._limit
        assert {(p, c.writer) for p, c in self._claims.items()} == {
            (page, writer) for writer, pages in self._pages.items() for page in pages
        }
        assert all(self._pages.values())
        ends = [claim.until_s for claim in self._claims.values()]
        assert ends == sorted(ends)
