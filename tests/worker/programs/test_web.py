"""HTTP for programs: what is granted and nothing else, to addresses that were checked."""

from __future__ import annotations

import json
import logging
import ssl
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from pie.wire.programs import HttpAnswer, HttpCall, Trouble
from pie.worker.programs.trouble import CallError
from pie.worker.programs.web import Web, is_public, new_client
from pie.worker.settings import HttpGrant, ProgramSettings
from tests.support.web_server import WebServer, certificate_for, web_server


@pytest.fixture
def server() -> Iterator[WebServer]:
    with web_server() as one:
        yield one


@asynccontextmanager
async def granting(
    *grants: Mapping[str, object],
    leads_to: Sequence[str] = ("127.0.0.1",),
    client: Callable[[], httpx.AsyncClient] | None = None,
    **fields: object,
) -> AsyncIterator[Web]:
    async def resolve(_host: str, _port: int) -> list[str]:
        return list(leads_to)

    settings = ProgramSettings.model_validate({"http": grants, **fields})
    web = Web(settings, resolve=resolve, client=client)
    yield web
    await web.close()


async def ask(
    web: Web, url: str, method: str = "GET", body: bytes = b"", **headers: str
) -> tuple[HttpAnswer, bytes]:
    sent = tuple((name.replace("_", "-"), value) for name, value in headers.items())
    answer, frames = await web.ask(HttpCall(1, method, url, sent), body)
    return answer, bytes(frames[0])


async def refused(web: Web, url: str, method: str = "GET", **options: Any) -> CallError:
    with pytest.raises(CallError) as caught:
        await ask(web, url, method, **options)
    return caught.value


async def test_nothing_is_granted_by_default(server: WebServer) -> None:
    async with granting() as web:
        error = await refused(web, server.origin() + "/echo")
    assert error.trouble is Trouble.NOT_ALLOWED
    assert f'[programs] http = [{{origin = "{server.origin()}"}}]' in error.message
    assert not server.asked


async def test_what_programs_ask_is_in_no_log(
    server: WebServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("httpx", "httpcore"):
        monkeypatch.setattr(logging.getLogger(name), "level", logging.NOTSET)
    caplog.set_level(logging.DEBUG)
    async with granting({"origin": server.origin()}) as web:
        await ask(web, server.origin() + "/echo?patient=jane")
    assert server.asked == ["GET /echo?patient=jane"]
    assert "jane" not in caplog.text


async def test_what_is_granted_is_asked_and_answered(server: WebServer) -> None:
    grant = {"origin": server.origin(), "methods": ["GET", "POST"]}
    async with granting(grant) as web:
        answer, data = await ask(web, server.origin() + "/echo?q=1", x_lamp="oil")
        assert answer.status == 200
        assert ("content-type", "application/json") in answer.headers
        told = json.loads(data)["headers"]
        assert (told["host"], told["x-lamp"]) == (f"127.0.0.1:{server.port}", "oil")
        assert not {"authorization", "cookie", "proxy-connection"} & set(told)
        answer, data = await ask(web, server.origin() + "/echo", "POST", b"light")
        assert json.loads(data)["body"] == "light"
    assert server.asked == ["GET /echo?q=1", "POST /echo"]


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:{other}/echo",
        "https://127.0.0.1:{port}/echo",
        "http://localhost:{port}/echo",
        "http://2130706433:{port}/echo",
        "http://127.1:{port}/echo",
        "http://[::ffff:127.0.0.1]:{port}/echo",
        "http://127.0.0.1.:{port}/echo",
    ],
)
async def test_another_origin_is_another(server: WebServer, url: str) -> None:
    async with granting({"origin": server.origin()}) as web:
        asked = url.format(port=server.port, other=server.port + 1)
        assert (await refused(web, asked)).trouble is Trouble.NOT_ALLOWED
    assert not server.asked


async def test_another_method_is_refused_by_name(server: WebServer) -> None:
    async with granting({"origin": server.origin()}) as web:
        error = await refused(web, server.origin() + "/echo", "DELETE")
    assert error.trouble is Trouble.NOT_ALLOWED
    assert "by GET, HEAD and not by DELETE" in error.message
    assert not server.asked


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "10.0.0.5", "169.254.169.254", "::1", "::ffff:127.0.0.1", "fe80::1%1"]
)
async def test_a_name_leads_to_no_private_address(server: WebServer, address: str) -> None:
    origin = server.origin("lamp.test")
    async with granting({"origin": origin}, leads_to=[address]) as web:
        error = await refused(web, origin + "/echo")
    assert error.trouble is Trouble.NOT_ALLOWED
    assert "private = true" in error.message
    assert not server.asked


async def test_unless_its_grant_says_so(server: WebServer) -> None:
    origin = server.origin("lamp.test")
    async with granting({"origin": origin, "private": True}) as web:
        _, data = await ask(web, origin + "/echo")
    assert json.loads(data)["headers"]["host"] == f"lamp.test:{server.port}"


async def test_a_name_that_has_several_addresses_is_tried_at_each(server: WebServer) -> None:
    origin = server.origin("lamp.test")
    grant = {"origin": origin, "private": True}
    async with granting(grant, leads_to=["127.0.0.2", "::1", "127.0.0.1"]) as web:
        answer, _ = await ask(web, origin + "/echo")
    assert answer.status == 200


async def test_no_redirect_is_followed(server: WebServer) -> None:
    async with granting({"origin": server.origin()}) as web:
        answer, _ = await ask(web, server.origin() + "/redirect")
        assert answer.status == 302
        (where,) = [value for name, value in answer.headers if name == "location"]
        assert (await refused(web, where)).trouble is Trouble.NOT_ALLOWED


async def test_what_is_too_large_or_too_slow_is_given_up(server: WebServer) -> None:
    grant = {"origin": server.origin(), "methods": ["GET", "POST"]}
    async with granting(grant, http_bytes=4096, http_timeout_s=60) as web:
        error = await refused(web, server.origin() + "/big")
        assert error.trouble is Trouble.HTTP_FAILED
        assert "larger than 4096 bytes ([programs] http_bytes)" in error.message
        error = await refused(web, server.origin() + "/echo", "POST", body=b"x" * 4097)
        assert error.trouble is Trouble.BAD_CALL
    async with granting(grant, http_timeout_s=0.3) as web:
        error = await refused(web, server.origin() + "/slow")
        assert error.trouble is Trouble.HTTP_FAILED
        assert "[programs] http_timeout_s" in error.message
    # On a busy machine the last one may have been given up before it was there.
    assert server.asked in (["GET /big"], ["GET /big", "GET /slow"])


async def test_who_does_not_answer_is_named(server: WebServer) -> None:
    origin = f"http://127.0.0.1:{server.port}"
    server.shutdown()
    server.server_close()
    async with granting({"origin": origin}) as web:
        error = await refused(web, origin + "/echo")
    assert error.trouble is Trouble.HTTP_FAILED
    assert error.message.startswith(f"{origin}/echo cannot be asked: ")


@pytest.mark.parametrize(
    ("url", "headers"),
    [
        ("ftp://127.0.0.1/", {}),
        ("http://a:b@127.0.0.1/", {}),
        ("not a url", {}),
        ("http://127.0.0.1/\r\nx: y", {}),
        ("{origin}/echo", {"host": "other"}),
        ("{origin}/echo", {"Transfer_Encoding": "chunked"}),
        ("{origin}/echo", {"x": "a\r\ny: b"}),
        ("{origin}/echo", {"x y": "a"}),
    ],
)
async def test_what_cannot_be_meant(server: WebServer, url: str, headers: dict[str, str]) -> None:
    async with granting({"origin": server.origin()}) as web:
        error = await refused(web, url.format(origin=server.origin()), **headers)
    assert error.trouble is Trouble.BAD_CALL
    assert not server.asked


async def test_a_certificate_is_checked_against_the_name_and_not_the_address(
    tmp_path: Path,
) -> None:
    tls, trusted = certificate_for("lamp.test", tmp_path)

    def client() -> httpx.AsyncClient:
        made = new_client()
        context = ssl.create_default_context(cafile=str(trusted))
        return httpx.AsyncClient(verify=context, trust_env=False, headers=made.headers)

    with web_server(tls) as server:
        right, wrong = server.origin("lamp.test"), server.origin("other.test")
        grants = [{"origin": one, "private": True} for one in (right, wrong)]
        async with granting(*grants, client=client) as web:
            answer, _ = await ask(web, right + "/echo")
            assert answer.status == 200
            error = await refused(web, wrong + "/echo")
            assert error.trouble is Trouble.HTTP_FAILED
            assert "certificate" in error.message
        async with granting(*grants) as web:
            assert "certificate" in (await refused(web, right + "/echo")).message
        assert server.asked == ["GET /echo"]


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.216.34", True),
        ("2606:2800:220:1::1", True),
        ("0.0.0.0", False),
        ("100.64.0.1", False),
        ("192.168.1.1", False),
        ("224.0.0.1", False),
        ("fd00::1", False),
        ("64:ff9b::7f00:1", False),
        ("2002:7f00:1::", False),
        ("2001:0:0:0:0:0:0:1", False),
    ],
)
def test_which_addresses_are_public(address: str, public: bool) -> None:
    assert is_public(address) is public


@pytest.mark.parametrize(
    "origin",
    ["lamp.test", "ftp://lamp.test", "https://lamp.test/path", "http://u@x", "http://x:99999"],
)
def test_a_grant_names_an_origin(origin: str) -> None:
    with pytest.raises(ValidationError, match="an origin is https://HOST"):
        HttpGrant(origin=origin)


def test_a_grants_methods_are_capitals() -> None:
    with pytest.raises(ValidationError, match="names in capitals"):
        HttpGrant(origin="https://lamp.test", methods=("get",))
