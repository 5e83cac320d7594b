"""Keys open what they are for; tenants share no pages, keep to their quota and have their turn."""

from __future__ import annotations

import asyncio
import errno
import ssl
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from pydantic import ValidationError

from pie.index.allowance import HOLD_S, KEEP_S, MemoryAllowances
from pie.router.access import Access
from pie.router.errors import ApiError, CertificateError, KeyFileError
from pie.router.key_file import KeyFile, editing, read_key_file, write_key_file
from pie.router.quota import Quota
from pie.router.settings import RouterSettings
from pie.router.tls import server_context, trusted
from tests.router.conftest import WAIT_S, Cluster, until
from tests.router.test_quota import settled

CHAT = "/v1/chat/completions"
HELLO: Any = [{"role": "user", "content": "Why is the sky blue? " * 12}]


class Keys:
    """A file of keys, and the keys that are in it."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def make(self, tenant: str, *, is_admin: bool = False, **limits: int | None) -> str:
        with editing(self.file) as edited:
            content = edited.content.with_tenant(tenant, **limits)
            edited.content, _, key = content.with_key(tenant, is_admin=is_admin, note="")
        return key

    def revoke_all(self) -> None:
        write_key_file(self.file, KeyFile(read_key_file(self.file).tenants))


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path / "keys.json")


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_a_key_opens_what_it_is_for_until_it_is_revoked(
    cluster: Cluster, http: httpx.AsyncClient, keys: Keys
) -> None:
    plain, admin = keys.make("acme"), keys.make("acme", is_admin=True)
    cluster.mock("w0")
    router = await cluster.router(1, keys_file=keys.file, api_token="own")
    for path in ("/admin/requests", "/status", "/metrics", "/v1/models"):
        ours = path != "/v1/models"
        for key, status in ((plain, 403 if ours else 200), (admin, 200), ("own", 200), ("no", 401)):
            answer = await http.get(router.url + path, headers=bearer(key))
            assert answer.status_code == status, (path, key)
        assert (await http.get(router.url + path)).status_code == 401
    told = (await http.get(router.url + "/status", headers=bearer(plain))).json()["error"]
    assert (told["code"], told["type"]) == ("insufficient_scope", "permission_error")
    keys.revoke_all()
    until_s = time.monotonic() + WAIT_S
    while (await http.get(router.url + "/v1/models", headers=bearer(plain))).status_code != 401:
        assert time.monotonic() < until_s
        await asyncio.sleep(0.05)


async def test_a_file_that_breaks_leaves_keys_as_they_were(
    cluster: Cluster, http: httpx.AsyncClient, keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    key = keys.make("acme")
    router = await cluster.router(0, keys_file=keys.file)
    keys.file.write_text('{"keys": 1}')
    await asyncio.sleep(1.1)
    answer = await http.get(router.url + "/v1/models", headers=bearer(key))
    assert answer.status_code == 200
    assert "is no file of API keys" in caplog.text


def test_a_file_that_could_not_be_read_once_is_read_again(
    keys: Keys, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    key = keys.make("acme")
    access = Access(RouterSettings(keys_file=keys.file), MemoryAllowances("router"))
    keys.revoke_all()

    def fails(file: Path) -> KeyFile:
        raise KeyFileError(f"{file}: cannot be read") from OSError(errno.EMFILE, "too many files")

    with monkeypatch.context() as patched:
        patched.setattr("pie.router.access.read_key_file", fails)
        # A key that nobody has is looked for in the file each time.
        for _ in range(3):
            with pytest.raises(ApiError):
                access.caller("Bearer none", admin=False)
        assert access.caller(f"Bearer {key}", admin=False).tenant == "acme"
        assert caplog.text.count("cannot be read") == 1
    with pytest.raises(ApiError):
        access.caller("Bearer none", admin=False)
    with pytest.raises(ApiError):
        access.caller(f"Bearer {key}", admin=False)


def entering(access: Access, key: str) -> Quota:
    quota = access.caller(f"Bearer {key}", admin=False).quota
    assert quota is not None
    return quota


async def test_a_tenant_that_is_put_back_has_taken_what_it_had(keys: Keys) -> None:
    now_s = 0.0
    allowances = MemoryAllowances("router", lambda: now_s)
    key = keys.make("acme", requests_per_minute=100, concurrent=1)
    access = Access(RouterSettings(keys_file=keys.file), allowances, lambda: now_s)
    with_tenant = read_key_file(keys.file)
    for at in range(100):
        await entering(access, key).enter(1)
        if at < 99:
            entering(access, key).leave(1)
    write_key_file(keys.file, KeyFile())
    with pytest.raises(ApiError, match="Incorrect"):
        access.caller(f"Bearer {key}1", admin=False)
    # Its request goes on meanwhile, and is counted for all.
    assert [quota.inside for quota in access.quotas] == [1]
    write_key_file(keys.file, with_tenant)
    now_s = 0.6
    with pytest.raises(ApiError, match="1 sequences in flight"):
        await entering(access, key).enter(1)
    entering(access, key).leave(1)
    await settled()
    await entering(access, key).enter(1)
    entering(access, key).leave(1)
    await settled()
    with pytest.raises(ApiError, match="100 requests a minute"):
        await entering(access, key).enter(1)


async def test_a_tenant_that_is_gone_is_forgotten_once_nobody_remembers_it(keys: Keys) -> None:
    now_s = 0.0
    key = keys.make("acme", requests_per_minute=100, concurrent=1)
    allowances = MemoryAllowances("router", lambda: now_s)
    access = Access(RouterSettings(keys_file=keys.file), allowances, lambda: now_s)
    quota = entering(access, key)
    await quota.enter(1)
    write_key_file(keys.file, KeyFile())
    with pytest.raises(ApiError, match="Incorrect"):
        access.caller("Bearer none", admin=False)
    now_s = KEEP_S * 2
    assert list(access.quotas) == [quota]
    quota.leave(1)
    await settled()
    now_s += KEEP_S
    assert list(access.quotas) == [quota]
    now_s += 2 * HOLD_S + 1
    assert not access.quotas


def test_the_file_gives_no_key_away_and_is_its_owners_alone(keys: Keys) -> None:
    key = keys.make("acme", requests_per_minute=3)
    text = keys.file.read_text()
    assert key not in text
    assert key.rpartition("-")[2] not in text
    assert keys.file.stat().st_mode & 0o77 == 0
    assert read_key_file(keys.file).tenants["acme"].requests_per_minute == 3


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"tenants": {"a b": {"salt": "s"}}}',
        '{"tenants": {"a": {"salt": "s", "concurrent": 0}}}',
        '{"keys": {"k": {"hash": "' + "0" * 64 + '", "tenant": "a", "created": ""}}}',
        '{"tenants": {"a": {"salt": "s", "colour": 1}}}',
    ],
)
def test_what_is_no_file_of_keys_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "keys.json"
    file.write_text(text)
    with pytest.raises(KeyFileError, match=r"keys\.json"):
        read_key_file(file)


async def test_a_second_tenants_first_request_is_as_cold_as_the_first_tenants(
    cluster: Cluster, keys: Keys
) -> None:
    mock = cluster.mock("w0")
    router = await cluster.router(1, keys_file=keys.file)
    one, two = (cluster.openai(router, api_key=keys.make(name)) for name in ("one", "two"))

    async def cached(client: openai.AsyncOpenAI, **extra: Any) -> int:
        answer = await client.chat.completions.create(
            model="mock", messages=HELLO, max_tokens=4, extra_body=extra
        )
        assert answer.usage
        assert answer.usage.prompt_tokens_details
        return answer.usage.prompt_tokens_details.cached_tokens or 0

    assert await cached(one) == 0
    assert await cached(two) == 0
    assert await cached(one) > 16
    assert await cached(one, cache_salt="own") == 0
    salts = [event["salt"] for event in mock.events("generate")]
    assert salts[0] == salts[2]
    assert len(set(salts)) == 3
    # What another tenant calls its salt is of that tenant.
    assert await cached(two, cache_salt="own") == 0
    assert await cached(two, cache_salt=str(salts[0])) == 0
    # To rules a request is its tenant's, whatever salt it asks for within that.
    tags = [event["tenant_tag"] for event in mock.events("generate")]
    assert tags[0] == tags[2] == tags[3] != ""
    assert tags[1] == tags[4] == tags[5] != tags[0]


async def test_quotas_are_kept_and_say_when_to_come_again(cluster: Cluster, keys: Keys) -> None:
    cluster.mock("w0", token_delay_s=0.02)
    router = await cluster.router(1, keys_file=keys.file)

    async def ask(key: str, **fields: Any) -> Any:
        client = cluster.openai(router, api_key=key)
        return await client.chat.completions.create(
            **({"model": "mock", "messages": HELLO, "max_tokens": 4} | fields)
        )

    few = keys.make("few", requests_per_minute=2)
    for _ in range(2):
        await ask(few)
    with pytest.raises(openai.RateLimitError, match="2 requests a minute") as refused:
        await ask(few)
    assert 20 <= int(refused.value.response.headers["retry-after"]) <= 30
    assert refused.value.code == "rate_limit_exceeded"

    short = keys.make("short", tokens_per_minute=50)
    await ask(short)  # A prompt of more than a minute's worth comes through when none is owed.
    with pytest.raises(openai.RateLimitError, match="50 tokens a minute"):
        await ask(short)

    slow = keys.make("slow", concurrent=2)
    with pytest.raises(openai.BadRequestError, match="more than the 2 that tenant slow"):
        await ask(slow, n=3)
    stream = await ask(slow, stream=True, max_tokens=200, n=2, extra_body={"ignore_eos": True})
    await anext(aiter(stream))
    with pytest.raises(openai.RateLimitError, match="2 sequences in flight"):
        await ask(slow)
    await stream.close()
    await until(lambda: router.status().in_flight == 0)
    assert (await ask(slow)).choices


async def test_a_tenants_priority_reaches_the_worker_and_no_request_jumps_it(
    cluster: Cluster, keys: Keys
) -> None:
    mock = cluster.mock("w0")
    router = await cluster.router(1, keys_file=keys.file, api_token="own")
    for key, asked, sent in (
        (keys.make("late", priority=5), None, 5),
        (keys.make("late"), 3, 5),
        (keys.make("late"), 9, 9),
        ("own", -4, -4),
        ("own", None, 0),
    ):
        client = cluster.openai(router, api_key=key)
        extra = {} if asked is None else {"priority": asked}
        await client.completions.create(
            model="mock", prompt="hello", max_tokens=1, extra_body=extra
        )
        assert mock.events("generate")[-1]["priority"] == sent


async def test_a_browser_may_ask_only_where_its_page_is_listed(
    cluster: Cluster, http: httpx.AsyncClient
) -> None:
    closed = await cluster.router(0)
    opened = await cluster.router(0, cors_origins=("https://chat.example",), api_token="own")
    wish = {"origin": "https://chat.example", "access-control-request-method": "POST"}
    assert (await http.options(closed.url + CHAT, headers=wish)).status_code == 405
    answer = await http.get(closed.url + "/health", headers=wish)
    assert "access-control-allow-origin" not in answer.headers
    allowed = await http.options(opened.url + CHAT, headers=wish)
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == wish["origin"]
    refused = await http.post(opened.url + CHAT, headers={"origin": wish["origin"]}, json={})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == wish["origin"]
    other = await http.get(opened.url + "/health", headers={"origin": "https://evil.example"})
    assert "access-control-allow-origin" not in other.headers


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 -subj /CN=pie"
    subprocess.run(
        ["openssl", *words.split(), "-keyout", str(key), "-out", str(cert)],
        check=True,
        capture_output=True,
    )
    return cert, key


async def test_https_answers_and_streams(cluster: Cluster, certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    cluster.mock("w0")
    router = await cluster.router(1, tls_cert_file=cert, tls_key_file=key)
    assert router.url.startswith("https://")
    verify = trusted(router.settings)
    async with httpx.AsyncClient(verify=verify, timeout=30) as http:
        client = cluster.openai(router, http_client=http)
        stream = await client.completions.create(
            model="mock", prompt="hello", max_tokens=9, stream=True
        )
        assert "".join([event.choices[0].text async for event in stream])
    async with httpx.AsyncClient() as stranger:
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            await stranger.get(router.url + "/health")


def test_a_certificate_that_cannot_be_used_is_told(certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    for files in ((cert, cert), (cert, cert.with_name("none.pem"))):
        settings = RouterSettings(tls_cert_file=files[0], tls_key_file=files[1])
        with pytest.raises(CertificateError, match=r"router\.tls_cert_file"):
            server_context(settings)
    assert isinstance(
        server_context(RouterSettings(tls_cert_file=cert, tls_key_file=key)), ssl.SSLContext
    )
    with pytest.raises(ValidationError, match="set together"):
        RouterSettings(tls_cert_file=cert)
    with pytest.raises(ValidationError, match="no origin"):
        RouterSettings(cors_origins=("chat.example",))
    with pytest.raises(ValidationError, match="keys_file"):
        RouterSettings(host="0.0.0.0")
    assert RouterSettings(host="0.0.0.0", keys_file=cert).keys_file
