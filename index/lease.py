"""One holder at a time of a name in Redis.

Covers taking, keeping and giving back a lease: whoever holds `cluster` is the one that may name
places under a key prefix. Does not cover places themselves, which are fenced by epoch
(`pie.index.scripts`).
"""

from __future__ import annotations

import logging

from pie.index.client import make_client, translated
from pie.index.errors import IndexUnavailableError
from pie.index.settings import IndexSettings
from pie.index.trouble import Trouble

log = logging.getLogger("pie.index.lease")

_HOLDER = """
-- What is of another type was written by somebody else, and says of no holder.
local kind = redis.call('TYPE', KEYS[1]).ok
local holder = kind == 'string' and redis.call('GET', KEYS[1])
"""

_KEEP = (
    _HOLDER
    + """
if holder and holder ~= ARGV[1] then
    -- Where the clock was set back it would outlast by as much a holder that has died.
    local left = redis.call('PTTL', KEYS[1])
    if left < 0 or left > tonumber(ARGV[2]) then redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
    return holder
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return false
"""
)

_GIVE_BACK = (
    _HOLDER
    + """
if holder == ARGV[1] then
    redis.call('DEL', KEYS[1])
end
"""
)


class Lease:
    """A name that one holder has at a time, until it is given back or not kept. Blocking.

    Args:
        url: Redis.
        name: What is held.
        holder: Who holds it, told to whoever comes second.
        ttl_s: The lease ends when it was not kept for so long.
        settings: Key prefix and time limits.
    """

    def __init__(
        self,
        url: str,
        name: str,
        holder: str,
        *,
        ttl_s: float = 10.0,
        settings: IndexSettings | None = None,
    ) -> None:
        settings = settings or IndexSettings()
        self._client = make_client(url, settings)
        self._key = f"{settings.key_prefix}:lease:{name}"
        self._holder = holder
        self._trouble = Trouble(log)
        self._ttl_ms = int(ttl_s * 1000)

    def keep(self) -> str | None:
        """Take the lease or keep it for another `ttl_s`; return who else holds it, if anybody.

        Raises:
            IndexUnavailableError: Redis does not answer; nothing is known.
            IndexRefusedError: Redis refuses.
        """
        with translated():
            other = self._client.eval(_KEEP, 1, self._key, self._holder, str(self._ttl_ms))
        return other.decode() if isinstance(other, bytes) else None

    def renew(self) -> str | None:
        """Keep the lease as `keep` does, or try to; return who else is known to hold it.

        That Redis does not do it is said once, and once when it does again.
        """
        try:
            other = self.keep()
        except IndexUnavailableError as error:
            self._trouble.begins("%s cannot be kept, and is tried again: %s", self._key, error)
            return None
        self._trouble.ends("%s is kept again", self._key)
        return other

    def give_back(self) -> None:
        """Let others take the lease, if it is ours, and disconnect.

        Raises:
            IndexUnavailableError: Redis does not answer; the lease ends by itself.
        """
        try:
            with translated():
                self._client.eval(_GIVE_BACK, 1, self._key, self._holder)
        finally:
            self._client.close()
