"""What a page in somebody's browser can have a router do without a key, and what it cannot."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.router.conftest import Cluster

pytestmark = pytest.mark.live
CHAT = "/v1/chat/completions"
GOOD: Any = {"model": "mock", "messages": [{"role": "user", "content": "hello"}]}
LET_IN = 503
"""What a router without workers answers to whom it lets in."""


@pytest.mark.parametrize("token", ["", "secret"], ids=["without a key", "with a key"])
async def test_pages_of_other_origins_are_refused_and_all_others_are_let_in(
    cluster: Cluster, http: httpx.AsyncClient, token: str
) -> None:
    router = await cluster.router(0, cors_origins=("https://chat.example",), api_token=token)
    here = urlsplit(router.url).netloc
    http.headers["authorization"] = f"Bearer {token or 'none'}"
    for headers, status in (
        ({}, LET_IN),
        ({"origin": "https://chat.example"}, LET_IN),
        ({"origin": "https://chat.example", "sec-fetch-site": "cross-site"}, LET_IN),
        ({"origin": f"http://{here}"}, LET_IN),
        ({"origin": f"http://{here}", "sec-fetch-site": "same-origin"}, LET_IN),
        ({"sec-fetch-site": "none"}, LET_IN),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "https://chat.example.evil.example"}, 403),
        ({"origin": "https://evil.example", "sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
    ):
        answer = await http.post(router.url + CHAT, json=GOOD, headers=headers)
        assert answer.status_code == status, headers
        gone = await http.delete(router.url + "/v1/responses/resp_none", headers=headers)
        assert gone.status_code == (404 if status == LET_IN else 403), headers


async def test_a_body_that_is_not_said_to_be_json_is_read_nowhere(
    cluster: Cluster, http: httpx.AsyncClient
) -> None:
    router = await cluster.router(0)
    paths = ("chat/completions", "completions", "responses", "embeddings")
    for path in (*(f"/v1/{path}" for path in paths), "/tokenize", "/detokenize", "/admin/policies"):
        for headers in ({}, {"content-type": "text/plain"}):
            answer = await http.post(router.url + path, content=b"{}", headers=headers)
            assert answer.status_code == 415, path


async def test_a_name_that_leads_here_opens_nothing_where_no_key_is_needed(
    cluster: Cluster, http: httpx.AsyncClient
) -> None:
    own: dict[str, Any] = {"cors_origins": ("https://chat.example:8443",)}
    open_, keyed = await cluster.router(0, **own), await cluster.router(0, api_token="a", **own)
    for host in ("localhost:1", "127.0.0.1", "[::1]:8000", "pie", "pie.localhost", "chat.example"):
        answer = await http.get(open_.url + "/v1/models", headers={"host": host})
        assert answer.status_code == 200, host
    for host in ("rebind.evil.example", "127.0.0.1.evil.example:8000", "chat.example.evil.example"):
        answer = await http.get(open_.url + "/v1/models", headers={"host": host})
        assert answer.status_code == 421, host
        assert answer.json()["error"]["code"] == "host_not_allowed"
        assert (await http.get(keyed.url + "/health", headers={"host": host})).status_code == 200


async def test_a_listed_page_may_use_openais_client(
    cluster: Cluster, http: httpx.AsyncClient
) -> None:
    router = await cluster.router(0, cors_origins=("https://chat.example",))
    asked = "authorization,content-type,x-stainless-lang,x-stainless-retry-count"
    wish = {
        "origin": "https://chat.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": asked,
    }
    answer = await http.options(router.url + CHAT, headers=wish)
    assert answer.status_code == 200
    allowed = answer.headers["access-control-allow-headers"].replace(" ", "").split(",")
    assert set(allowed) >= set(asked.split(","))
    refused = await http.options(router.url + CHAT, headers=wish | {"origin": "https://a.example"})
    assert refused.status_code == 400
