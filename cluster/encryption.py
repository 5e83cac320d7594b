"""The keys that pages at rest are encrypted with.

Covers reading them from a setting or a file. Does not cover what is encrypted with them
(`pie.page.cipher`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pie.cluster.errors import ConfigError
from pie.cluster.settings import ClusterSettings
from pie.page.cipher import KEY_BYTES

_MOST_KEYS = 64


def encryption_keys(settings: ClusterSettings) -> tuple[bytes, ...]:
    """Return the keys, the one that writes first; none where nothing is to be encrypted.

    Those of `encryption_keys` come before those of `encryption_key_file`.

    Raises:
        ConfigError: A file cannot be read or a key is none. No key is shown.
    """
    name = "cluster.encryption_keys"
    words = [(name, word) for word in settings.encryption_keys.get_secret_value().split()]
    file = settings.encryption_key_file
    if file is not None:
        name = f"cluster.encryption_key_file: {file}"
        try:
            text = file.expanduser().read_text(encoding="ascii")
        except (OSError, UnicodeDecodeError) as error:
            what = error.strerror if isinstance(error, OSError) else "it is not ASCII text"
            raise ConfigError([f"{name} cannot be read: {what}"]) from error
        found = list(_lines(name, text))
        if not found:
            raise ConfigError([f"{name} holds no key: {_WANTED}"])
        words += found
    return _keys(words)


_WANTED = "a key is 64 hexadecimal digits, such as `openssl rand -hex 32` prints"


def _lines(name: str, text: str) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip() and not line.lstrip().startswith("#"):
            yield f"{name}:{number}", line.strip()


def _keys(words: Iterable[tuple[str, str]]) -> tuple[bytes, ...]:
    keys: dict[bytes, str] = {}
    problems = []
    for place, word in words:
        try:
            key = bytes.fromhex(word)
        except ValueError:
            key = b""
        if len(key) != KEY_BYTES:
            problems.append(f"{place}: {_WANTED}")
        elif key in keys:
            problems.append(f"{place}: this key is there already, at {keys[key]}")
        else:
            keys[key] = place
    if len(keys) > _MOST_KEYS:
        problems.append(f"at most {_MOST_KEYS} encryption keys are allowed, not {len(keys)}")
    if problems:
        raise ConfigError(problems)
    return tuple(keys)
