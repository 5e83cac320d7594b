"""What a URL of Redis may say, and that no password is ever said again."""

import pytest
from hypothesis import example, given, strategies as st
from pydantic import ValidationError

from pie.cluster.config import load_config
from pie.cluster.errors import ConfigError
from pie.cluster.reference import shown
from pie.index.address import Deployment, masked, parse_address
from pie.index.client import make_async_client, make_client
from pie.index.settings import IndexSettings


def test_a_url_says_where_and_how() -> None:
    found = parse_address("rediss+sentinel://pie:s%40@a,[::1]:7/pages/2?sentinel_password=x")
    assert found.deployment is Deployment.SENTINEL
    assert found.tls
    assert found.hosts == (("a", 26379), ("::1", 7))
    assert found.master == "pages"
    assert (found.options["username"], found.options["password"]) == ("pie", "s@")
    assert found.options["db"] == 2
    assert found.sentinel_options == {"password": "x", "ssl": True}
    cluster = parse_address("redis+cluster://a:1,b")
    assert cluster.deployment is Deployment.CLUSTER
    assert (cluster.hosts, cluster.tls) == ((("a", 1), ("b", 6379)), False)
    server = parse_address("rediss://:p%2F@a/3?ssl_ca_certs=/ca.pem&ssl_check_hostname=false")
    assert (server.hosts, server.tls) == ((("a", 6379),), True)
    assert server.options == {
        "password": "p/",
        "db": 3,
        "ssl_ca_certs": "/ca.pem",
        "ssl_check_hostname": False,
    }
    here = parse_address("unix://:p@/tmp/a%20b@c?db=4")
    assert (here.path, here.options) == ("/tmp/a b@c", {"password": "p", "db": 4})
    assert parse_address("redis://a/").options == {}


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("redis+sentinel://a,b", "name of the master"),
        ("redis+sentinel://a/name/x", "the database is a number"),
        ("redis+sentinel://a/name/1/2", "more behind the host than a database"),
        ("redis+cluster://a/1", "a Cluster has one database"),
        ("redis+cluster://a,,b", "a host is missing"),
        ("redis+cluster://a:b", "'a' is not HOST, HOST:PORT"),
        ("redis://a,b", "'a,b' is not HOST, HOST:PORT"),
        ("redis://", "a host is missing"),
        ("redis://:secret", "a host is missing"),
        ("redis://a:0", "the port of 'a' is none from 1 to 65535"),
        ("redis://a:65536", "the port of 'a' is none from 1 to 65535"),
        ("redis://a/abc", "the database is a number"),
        ("redis://a/1/2", "more behind the host than a database"),
        ("unix://a/b", "whole path, as in unix:///PATH"),
        ("unix://:p@", "path of the socket is missing"),
        ("unix:///a?db=x", "the database is a number"),
        ("unix:///a?decode_responses=1", "'decode_responses' is not known; allowed: db"),
        ("redis+other://a", "begin with one of redis, redis\\+cluster"),
        ("redis://a?decode_responses=1", "'decode_responses' is not known; allowed: none; of TLS"),
        ("redis://a?ssl_ca_certs=/x", "with rediss in the scheme"),
        ("redis://a?retry", "'retry' is not known"),
        ("rediss://a?encoding=x", "'encoding' is not known; allowed: ssl_ca_certs, ssl_certfile"),
        ("rediss://a?ssl_ca_certs=", "'ssl_ca_certs' is said once, and with a value"),
        ("rediss://a?ssl_keyfile=x&ssl_keyfile=y", "'ssl_keyfile' is said once"),
        ("rediss://a?ssl_check_hostname=no", "'ssl_check_hostname' is true or false"),
        ("redis+sentinel://a/n?sentinel_pass=x", "allowed: sentinel_username, sentinel_password"),
        ("redis://:a/b@c", "`/` is written %2F"),
        ("redis://:a?b@c", "`\\?` %3F"),
        ("redis://:a#b@c", "`#` %23"),
        ("unix://:a/b@/c", "`/` is written %2F"),
    ],
)
def test_a_url_that_means_nothing_is_refused_with_the_reason(url: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_address(url)
    with pytest.raises(ValidationError, match="is no URL of a Redis"):
        IndexSettings(url=url)
    for make in (make_async_client, lambda said: make_client(said, IndexSettings())):
        with pytest.raises(ValueError, match=why):
            make(url)


_URLS = (
    "redis://:{}@host:1",
    "redis://me:{}@host/2",
    "rediss://me:{}@host?ssl_ca_certs=/x",
    "unix://:{}@/socket?db=1",
    "redis+sentinel://:{}@a,b/name",
    "redis+sentinel://a/name?sentinel_password={}",
    "redis+cluster://:{}@a,,b",
    "redis+cluster://:{}@a:x",
    "redis://:{}@host?decode_responses=1",
    "redis:/:{}@host",
    "other://:{}@host",
)


@given(
    password=st.text("QXZ/#?@:%&=+,[]; '\"\\\n", min_size=4, max_size=12),
    url=st.sampled_from(_URLS),
)
@example(password="QX/Z", url=_URLS[0])
@example(password="QX@Z", url=_URLS[6])
@example(password="QX#Z", url=_URLS[0])
@example(password="QX/Z", url=_URLS[3])
@example(password="QX&ZZZZ", url=_URLS[5])
def test_no_part_of_a_password_is_ever_said(password: str, url: str) -> None:
    text = url.format(password)
    said = [masked(text), masked(repr(text)), shown(text)]
    for error, ask in (
        (ValueError, lambda: parse_address(text)),
        (ValidationError, lambda: IndexSettings(url=text)),
        (ConfigError, lambda: load_config(None, {}, {("index", "url"): ("--index", text)})),
    ):
        try:
            ask()
        except error as found:
            said.append(str(found))
    for start in range(len(password) - 3):
        part = password[start : start + 4]
        assert not any(part in one for one in said), said
