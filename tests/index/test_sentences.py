"""What is said where Redis is not reached: of real servers, and which part of `index.url` to mend."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from pie.index.client import asking, make_async_client
from pie.index.errors import IndexUnavailableError
from pie.index.lease import Lease
from pie.index.sentences import sentence
from pie.index.server import EmbeddedServer
from pie.index.settings import IndexSettings
from tests.support.redis_deployments import Servers, behind_tls


@pytest.fixture(scope="module")
def ports() -> Iterator[dict[str, int]]:
    servers = Servers()
    try:
        plain = servers.start(['save ""'])
        yield {
            "plain": plain,
            "closed": servers.start(['save ""', "requirepass open"]),
            "sentinel": servers.start(
                [f"sentinel monitor pages 127.0.0.1 {plain} 1"], "--sentinel"
            ),
        }
    finally:
        servers.close()


def _blocking(url: str) -> None:
    Lease(url, "cluster", "me", settings=IndexSettings(url=url)).keep()


async def _awaiting(url: str) -> None:
    client = make_async_client(url)
    try:
        async with asking(10):
            await client.smembers("x")
    finally:
        await client.aclose()


async def _refused(url: str) -> set[str]:
    """Return what is said of a URL, by a tool and by a router."""
    with pytest.raises(IndexUnavailableError) as first:
        await asyncio.to_thread(_blocking, url)
    with pytest.raises(IndexUnavailableError) as second:
        await _awaiting(url)
    return {str(first.value), str(second.value)}


@pytest.mark.live
@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("redis://:hush@127.0.0.1:{closed}", "user or password is wrong"),
        ("redis://127.0.0.1:{closed}", "a password is needed"),
        ("redis+cluster://:hush@127.0.0.1:{closed}", "user or password is wrong"),
        ("redis+cluster://127.0.0.1:{plain}", "one server is redis:// in index.url"),
        ("redis+sentinel://127.0.0.1:{plain}/pages", "no Sentinel: index.url names their ports"),
        ("redis+sentinel://127.0.0.1:{sentinel}/other", "know no master other: its name"),
        ("redis+sentinel://127.0.0.1:1/pages", "asked for the master pages (ConnectionError)"),
        ("redis://127.0.0.1:{sentinel}", "a Sentinel's port is redis+sentinel:// in index.url"),
        ("redis://127.0.0.1:{plain}/99", "its number is behind the host in index.url"),
        ("rediss://127.0.0.1:{plain}?ssl_ca_certs=/nowhere", "ssl_ca_certs, ssl_certfile and"),
    ],
)
async def test_what_keeps_redis_from_being_reached_is_said_with_the_setting(
    ports: dict[str, int], url: str, words: str
) -> None:
    for said in await _refused(url.format(**ports)):
        assert words in said
        assert len(said) < 300
        assert "hush" not in said
        assert "local " not in said


@pytest.mark.live
async def test_what_is_wrong_with_a_certificate_is_said_with_the_setting(
    own_redis_server: EmbeddedServer, tmp_path: Path
) -> None:
    path = Path(own_redis_server.url.removeprefix("unix://"))
    async with behind_tls(path, tmp_path) as (port, cert):
        key = cert.with_name("key.pem")
        for url, words in (
            (f"rediss://localhost:{port}", "ssl_ca_certs in index.url names"),
            (f"rediss+cluster://localhost:{port}", "ssl_ca_certs in index.url names"),
            (f"rediss+sentinel://localhost:{port}/x", "sentinel_password and ssl_ca_certs"),
            (f"rediss://localhost:{port}?ssl_ca_certs={key}", "a file of TLS is of no use"),
            (f"redis://localhost:{port}", "a port with TLS is rediss and not redis"),
        ):
            for said in await _refused(url):
                assert words in said
                assert "<redis" not in said


def test_what_has_no_meaning_here_is_said_as_it_is_and_not_at_length() -> None:
    assert sentence("Error 111 connecting to h:1.\nConnection refused.") == (
        "Error 111 connecting to h:1. Connection refused."
    )
    assert sentence("TTL exhausted.") == "slots of the Cluster are moving; it is tried again"
    assert len(sentence("x" * 10_000)) < 400
    assert sentence("") == ""
