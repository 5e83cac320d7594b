"""Who asks: an API key or token becomes a caller, with a tenant's salt, quota and priority.

Covers what the `Authorization` header opens, and the file of keys, read anew when it changes. Does not
cover the file's format (`pie.router.key_file`) or counting (`pie.router.quota`).
"""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
from blake3 import blake3

from pie.index.allowance import HOLD_S, KEEP_S, Allowances
from pie.router.errors import ApiError, KeyFileError
from pie.router.key_file import KeyFile, hashed, read_key_file
from pie.router.quota import Quota
from pie.router.settings import RouterSettings

log = logging.getLogger("pie.router.access")

_LOOK_S = 1.0
"""How often the file is looked at, so that a revoked key is refused a second later."""
_FORGOTTEN_S = KEEP_S + 2 * HOLD_S
"""After so long nobody remembers what this router has drawn for a tenant."""
_SALT_BYTES = 16
_SCHEME = "bearer "


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks."""

    tenant: str = ""
    """Empty where keys are not in use, and for whoever has the router's own token."""
    is_admin: bool = True
    priority: int = 0
    own_salt: str | None = None
    """The tenant's."""
    quota: Quota | None = None

    def salt(self, asked: str | None) -> str | None:
        """Return the salt of a request's pages: the tenant's, and within it the request's own."""
        if self.own_salt is None:
            return asked
        both = msgspec.msgpack.encode((self.own_salt, asked))
        return blake3(both).hexdigest(_SALT_BYTES)

    def tenant_salt(self, asked: str | None) -> str | None:
        """Return the salt whose tag tells rules whose pages they are: the tenant's; without keys the request's own.

        What a request asks for within its tenant does not count, or a client with ever new salts would be ever
        new tenants to quotas.
        """
        return asked if self.own_salt is None else self.salt(None)

    def session(self, asked: str | None) -> str | None:
        """Return the name of a request's session, which no other tenant's is."""
        return asked if asked is None or not self.tenant else f"{self.tenant}/{asked}"

    def priority_of(self, asked: int | None) -> int:
        """Return a request's priority: later than its tenant's if it wants, never sooner."""
        if asked is None:
            return self.priority
        return max(self.priority, asked) if self.tenant else asked

    @asynccontextmanager
    async def enter(self, sequences: int) -> AsyncIterator[None]:
        """Count a request in, and out at its end.

        Raises:
            ApiError: The tenant's quota is used up.
        """
        if self.quota is None:
            yield
            return
        await self.quota.enter(sequences)
        try:
            yield
        finally:
            self.quota.leave(sequences)

    async def prompt(self, tokens: int) -> None:
        """Take a prompt's tokens from the quota.

        Raises:
            ApiError: It is used up.
        """
        if self.quota is not None:
            await self.quota.prompt(tokens)

    def answered(self, tokens: int) -> None:
        """Take an answer's tokens from the quota."""
        if self.quota is not None:
            self.quota.answered(tokens)


ANYBODY = Caller()


class Access:
    """Knows tokens and keys.

    Args:
        settings: The router's own token, and where its keys are.
        allowances: What is left of tenants' quotas, of all routers together.
        clock: Tells the time in seconds.

    Raises:
        KeyFileError: The file of keys cannot be read.
    """

    def __init__(
        self,
        settings: RouterSettings,
        allowances: Allowances,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._token = settings.api_token.get_secret_value().encode()
        self._file = None if settings.keys_file is None else Path(settings.keys_file)
        self._allowances = allowances
        self._clock = clock
        self._quotas: dict[str, Quota] = {}
        """Also of tenants that are gone: with the totals of a new one, what they had taken would be given back."""
        self._gone: set[str] = set()
        """Tenants that are not in the file any more."""
        self._callers: dict[str, Caller] = {}
        self._salts: list[str] = []
        self._seen: tuple[int, ...] | None = None
        self._told = ""
        """What was wrong with the file when it was read last."""
        self._looked_s = time.monotonic()
        if self._file is not None:
            self._seen = _stamp(self._file)
            self._take_in(read_key_file(self._file))

    def caller(self, authorization: str | None, *, admin: bool) -> Caller:
        """Return who asks.

        Args:
            authorization: The header.
            admin: Whether it is something for those who run the router.

        Raises:
            ApiError: 401 for a token that is not known, 403 for one that does not open this.
        """
        if not self._token and self._file is None:
            return ANYBODY
        given = authorization or ""
        token = given[len(_SCHEME) :] if given[: len(_SCHEME)].lower() == _SCHEME else ""
        if self._token and hmac.compare_digest(token.encode("latin-1"), self._token):
            return ANYBODY
        found = self._known(token)
        if found is None:
            raise ApiError(
                401,
                "Incorrect API key: send `Authorization: Bearer …` with "
                + ("router.api_token." if self._file is None else "a key of `pie key create`."),
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        if admin and not found.is_admin:
            raise ApiError(
                403,
                "This key may not ask that: it needs one of `pie key create --admin`.",
                "permission_error",
                code="insufficient_scope",
            )
        return found

    def salts(self) -> list[str] | None:
        """Return the salts of all tenants' pages, whose requests bring none; None where keys are not in use."""
        if self._file is None:
            return None
        self._look()
        return list(self._salts)

    @property
    def quotas(self) -> Iterable[Quota]:
        """The quotas of all tenants, also of those gone that have something in flight or were here a moment ago."""
        since_s = self._clock() - _FORGOTTEN_S
        for name in tuple(self._gone):
            if self._quotas[name].is_settled and self._quotas[name].claimed_s < since_s:
                self._gone.remove(name)
                del self._quotas[name]
        return tuple(self._quotas.values())

    def _known(self, token: str) -> Caller | None:
        """Return who has a key; None where nobody does.

        One that is not known may have been made this moment.
        """
        if not token:
            return None
        name = hashed(token)
        if time.monotonic() >= self._looked_s + _LOOK_S or name not in self._callers:
            self._look()
        return self._callers.get(name)

    def _look(self) -> None:
        """Read the file anew where it has changed; a broken one changes nothing."""
        if self._file is None:
            return
        self._looked_s = time.monotonic()
        stamp = _stamp(self._file)
        if stamp == self._seen:
            return
        try:
            content = read_key_file(self._file)
        except KeyFileError as error:
            # What a disk does not give now it may give in a moment; what is no file of keys stays none.
            if not isinstance(error.__cause__, OSError):
                self._seen = stamp
            if (told := str(error)) != self._told:
                log.error("the keys stay as they were: %s", told)  # noqa: TRY400
                self._told = told
            return
        self._seen, self._told = stamp, ""
        self._take_in(content)

    def _take_in(self, content: KeyFile) -> None:
        for name, tenant in content.tenants.items():
            if name in self._quotas:
                self._quotas[name].limit(tenant)
            else:
                self._quotas[name] = Quota(name, tenant, self._allowances, self._clock)
        self._gone = self._quotas.keys() - content.tenants.keys()
        salts = (Caller(own_salt=tenant.salt).salt(None) for tenant in content.tenants.values())
        self._salts = [salt for salt in salts if salt is not None]
        self._callers = {
            key.hash: Caller(
                key.tenant,
                key.is_admin,
                content.tenants[key.tenant].priority,
                content.tenants[key.tenant].salt,
                self._quotas[key.tenant],
            )
            for key in content.keys.values()
        }


def _stamp(file: Path) -> tuple[int, ...] | None:
    """Return what changes whenever a file is replaced; None where there is none."""
    try:
        seen = file.stat()
    except OSError:
        return None
    return (seen.st_ino, seen.st_size, seen.st_mtime_ns)
