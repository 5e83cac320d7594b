"""What routers share, put together: what is old of it leaves Redis."""

from __future__ import annotations

from typing import Any

from pie.index.client import make_client
from pie.index.settings import IndexSettings
from pie.index.shelf_sealed import sealed_name
from pie.router.allowances import QuotaKeeper
from pie.router.responding import Kept
from pie.router.settings import RouterSettings
from pie.router.sharing import Sharing
from tests.router.conftest import until
from tests.support.redis_server import index_settings, redis_server, redis_url

__all__ = ["index_settings", "redis_server", "redis_url"]


async def test_old_responses_leave_redis_though_nobody_puts_more(
    index_settings: IndexSettings,
) -> None:
    sharing = Sharing(
        RouterSettings(kept_s=1.0),
        index_url=index_settings.url,
        index=index_settings,
        secret=bytes(32),
        routers=1,
        on_untold=lambda _: None,
    )
    keeper = QuotaKeeper(sharing.commons, sharing.allowances, tuple, sharing.trim)
    keeper.start()
    client: Any
    with make_client(index_settings.url, index_settings) as client:
        name = sealed_name("responses", bytes(32))
        await sharing.responses.put("", "r", Kept(b"{}", b"[]", "r"))
        (kept,) = client.keys(f"{index_settings.key_prefix}:{{shelf:{name}.*}}:values")
        assert client.hlen(kept) == 1

        def is_gone() -> bool:
            # As the keeper does every few seconds.
            sharing.commons.on_back()
            return not client.exists(kept)

        await until(is_gone)
    await keeper.close()
    await sharing.close()
