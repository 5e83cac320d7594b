"""What a Redis client's error means, in one sentence, with the setting where one of ours is to be mended.

Covers words alone. Does not cover which of our errors it becomes (`pie.index.client`).
"""

from __future__ import annotations

import re

_MOST_CHARS = 300

_MEANINGS: tuple[tuple[str, str], ...] = (
    (
        r"CERTIFICATE_VERIFY_FAILED\] (?P<what>certificate verify failed: .*?) ?\(_ssl",
        "{what}: ssl_ca_certs in index.url names the file of who is to be trusted",
    ),
    (
        r"Error 2 connecting to (?!unix:)",
        "a file of TLS is not there: ssl_ca_certs, ssl_certfile and ssl_keyfile in index.url name PEM files",
    ),
    (
        r"(?:\[X509[^]]*\] (?P<what>[^(]*?) ?\(_ssl|PEM lib)",
        (
            "a file of TLS is of no use: ssl_ca_certs, ssl_certfile and ssl_keyfile in index.url "
            "name PEM files, the key that of the certificate"
        ),
    ),
    (
        r"Timeout connecting to server",
        "nobody answered in time; a port without TLS is redis and not rediss in index.url",
    ),
    (
        r"Connection closed by server",
        (
            "the server closed the connection; where it always does, a port with TLS is rediss and not redis "
            "in index.url"
        ),
    ),
    (
        r"Protocol error|while writing to socket\. Connection lost",
        "what listens there does not speak as Redis does; index.url names another port",
    ),
    (
        r"invalid username-password pair|WRONGPASS",
        "user or password is wrong: they are those in index.url, where `/`, `?`, `#` and `@` are written with %",
    ),
    (
        r"Authentication required|NOAUTH",
        "a password is needed, as in index.url = redis://[USER]:PASSWORD@HOST",
    ),
    (
        r"unknown command '(?:SENTINEL|sentinel)'",
        (
            "what listens there is no Sentinel: index.url names their ports (26379), or begins with redis:// "
            "for one server"
        ),
    ),
    (
        r"unknown command '(?P<what>\w+)'",
        "what listens there knows no command {what}: a Sentinel's port is redis+sentinel:// in index.url",
    ),
    (
        r"Cluster mode is not enabled",
        "what listens there is no node of a Cluster: one server is redis:// in index.url",
    ),
    (r"TTL exhausted", "slots of the Cluster are moving; it is tried again"),
    (
        r"DB index is out of range",
        "the server has no such database: its number is behind the host in index.url",
    ),
    (
        r"No master found for '(?P<what>[^']*)'\Z",
        "the Sentinels know no master {what}: its name is behind the hosts in index.url",
    ),
)


def sentence(text: str) -> str:
    """Return what a client's error says, for a person; one that has no meaning here as it is."""
    text = " ".join(text.split())
    if asked := re.match(r"No master found for '([^']*)' : ", text):
        # Behind it is how Python shows each Sentinel's client, and the kind of its error alone.
        kinds = dict.fromkeys(re.findall(r"\)> - (?:\w+:)?(\w+)", text))
        return (
            f"no Sentinel could be asked for the master {asked[1]} ({', '.join(kinds)}): index.url names "
            "their ports (26379), and where they need that sentinel_password and ssl_ca_certs"
        )
    _, node, why = text.partition("Please provide at least one reachable node: ")
    if node:
        return _cut(f"no node of the Cluster can be used: {sentence(why)}")
    for pattern, meaning in _MEANINGS:
        if found := re.search(pattern, text):
            return meaning.format(**found.groupdict())
    return _cut(text)


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_CHARS else f"{text[:_MOST_CHARS]}…"
