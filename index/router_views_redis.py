"""What routers tell each other, in Redis.

Covers what is written there and how much at a time. Does not cover what is meant by it (`pie.index.router_views`).

    <prefix>:{routers}:seeing          set: names of routers that may have a view; a hint
    <prefix>:{routers}:view:<router>   hash: `head` → a view without its pages, as msgpack; `g` and a group's key,
                                       `s` and a conversation's tag → its pages, 32 bytes each; expires
    <prefix>:{routers}:moves           stream: conversations that were moved; expires

Pages are written when they have changed alone, and read when they are not known yet: a conversation that grows
costs its pages once a turn. A head says how many there are and which is the last one, which names all before it.
"""

from __future__ import annotations

import logging
from bisect import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeAlias, cast

import msgspec
import redis

from pie.index.client import is_strange, make_client, raise_others, translated
from pie.index.errors import IndexStrangeError
from pie.index.router_views import (
    MOST_GROUPS,
    MOST_MOVES,
    MOST_ROUTERS,
    MOST_SESSION_PAGES,
    MOST_SESSIONS,
    TTL_S,
    Move,
    RouterView,
    SeenGroup,
    SeenSession,
    bounded,
)
from pie.index.settings import IndexSettings
from pie.page.events import PlaceId
from pie.page.key import PageKey

log = logging.getLogger("pie.index.router_views_redis")

_KEY_BYTES = 32
_PAGES_AT_ONCE = 8_192
"""Of one command: 256 KiB, which Redis copies in a tenth of a millisecond. A conversation that is longer has one alone."""
_PAGES_A_CALL = 32_768
"""Of one call, each way: a megabyte a second. What is beyond it follows at the next one."""
_PAGES_OF_ALL = 2 << 20
"""Of all views together, in equal parts: 64 MiB, for which Redis takes 70 MB."""
_HEADS_AT_ONCE = 16
_MOVES_TTL_MS = 600_000

_MOST_HEAD_BYTES = 1 << 20
"""Several times what a router writes. A larger one is not read."""

Pages = Sequence[PageKey]
# What no router writes is not read: a head that is beyond these is none.
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 32)]
_Number: TypeAlias = Annotated[float, msgspec.Meta(ge=-1e12, le=1e12)]


class _Ref(msgspec.Struct, frozen=True, array_like=True):
    """Which pages a field of the hash holds: how many, and the last one."""

    count: Annotated[int, msgspec.Meta(ge=0, le=MOST_SESSION_PAGES)] = 0
    last: bytes = b""


class _Group(msgspec.Struct, frozen=True, array_like=True):
    group: bytes
    uses_per_s: Annotated[float, msgspec.Meta(ge=0.0, le=1e9)]
    chain: _Ref
    model_root: bytes
    tenant_tag: str
    session_tag: str
    root: bytes = b""


class _Session(msgspec.Struct, frozen=True, array_like=True):
    tag: str
    place: str
    pages: _Ref
    used_s: _Number
    is_running: bool
    came_from: str | None
    moved_s: _Number
    shared: _Count
    model_root: bytes
    tenant_tag: str


class _Head(msgspec.Struct, frozen=True, array_like=True):
    groups: Annotated[tuple[_Group, ...], msgspec.Meta(max_length=MOST_GROUPS)]
    sessions: Annotated[tuple[_Session, ...], msgspec.Meta(max_length=MOST_SESSIONS)]


class RedisRouterViews:
    """What the routers of a cluster see, from one of them.

    Args:
        url: Redis.
        router: What this router is called; no other one is called so, and no earlier start of it was.
        settings: Key prefix and time limits.
        ttl_s: A router that says nothing for so long is forgotten.
        pages_of_all: Most pages of all routers' views together; each has an equal part of it.
    """

    def __init__(
        self,
        url: str,
        router: str,
        settings: IndexSettings | None = None,
        *,
        ttl_s: float = TTL_S,
        pages_of_all: int = _PAGES_OF_ALL,
    ) -> None:
        settings = settings or IndexSettings()
        self._client: redis.Redis = make_client(url, settings)
        base = f"{settings.key_prefix}:{{routers}}"
        self._names, self._moves = f"{base}:seeing", f"{base}:moves"
        self._view = f"{base}:view:"
        self._router = router
        self._ttl_ms = int(ttl_s * 1000)
        self._pages_of_all = pages_of_all
        self._routers = 1
        """How many routers there are, when that was looked at last."""
        self._begun_with = ""
        """Whose pages were read first the last time."""
        self._written: dict[str, _Ref] = {}
        """Pages in this router's hash, by field, the one written last at the end."""
        self._heard = ""
        """The latest move that was taken."""
        self._read: dict[str, dict[str, Pages]] = {}
        """Pages in other routers' hashes, by router and field, the one read last at the end."""

    def tell(self, view: RouterView) -> list[Move]:
        """Do as `RouterViews.tell` says."""
        view = bounded(view)
        # What was lost, as after a while without a word, is written anew at once.
        if not self._write(view):
            self._write(view)
        return self._new_moves()

    def others(self) -> Mapping[str, RouterView]:
        """Do as `RouterViews.others` says."""
        names = self._listed()
        heads: dict[str, _Head] = {}
        for at in range(0, len(names), _HEADS_AT_ONCE):
            some = self._small(names[at : at + _HEADS_AT_ONCE])
            if not some:
                continue
            with translated():
                pipe = self._client.pipeline(transaction=False)
                for name in some:
                    pipe.hget(self._view + name, "head")
                answers = pipe.execute(raise_on_error=False)
                raise_others(answers)
            for name, raw in zip(some, answers, strict=True):
                head = _decoded(raw)
                if head is not None:
                    heads[name] = head
        missing = [name for name in names if name not in heads]
        if missing:
            with translated():
                self._client.srem(self._names, *missing)
        self._read = {name: self._read.get(name, {}) for name in heads}
        room = _PAGES_A_CALL
        for name in self._in_turn(heads):
            room -= self._fetch(name, heads[name], room)
        return {name: self._seen(head, self._read[name]) for name, head in heads.items()}

    def move(self, moves: Sequence[Move]) -> None:
        """Do as `RouterViews.move` says."""
        if not moves:
            return
        for is_again in (False, True):
            with translated():
                pipe = self._client.pipeline(transaction=False)
                for one in moves[-MOST_MOVES:]:
                    fields: Any = {"tag": one.tag, "place": one.place}
                    pipe.xadd(self._moves, fields, maxlen=MOST_MOVES, approximate=True)
                pipe.pexpire(self._moves, _MOVES_TTL_MS)
                answers = pipe.execute(raise_on_error=False)
                raise_others(answers)
            if is_again or not any(map(is_strange, answers)):
                return
            self._unlink(self._moves)

    def withdraw(self) -> None:
        """Do as `RouterViews.withdraw` says."""
        self._written.clear()
        with translated():
            pipe = self._client.pipeline(transaction=False)
            pipe.unlink(self._view + self._router)
            pipe.srem(self._names, self._router)
            raise_others(pipe.execute(raise_on_error=False))

    def close(self) -> None:
        """Do as `RouterViews.close` says."""
        try:
            self.withdraw()
        finally:
            self._client.close()

    def _write(self, view: RouterView) -> bool:
        """Write what has changed; say whether all else was there."""
        key = self._view + self._router
        fields = {f"g{one.group.hex()}": one.chain for one in view.groups if one.chain}
        fields |= {f"s{one.tag}": one.pages for one in view.sessions if one.pages}
        fields = self._part(fields)
        gone = [field for field in self._written if field not in fields]
        try:
            for some in self._changed(fields):
                with translated():
                    self._client.hset(key, mapping=cast(Any, some))
                for field in some:
                    self._written.pop(field, None)
                    self._written[field] = _ref(fields[field])
        except IndexStrangeError:
            self._begin_anew(key)
            return False
        head = msgspec.msgpack.encode(self._head(view))
        with translated():
            pipe = self._client.pipeline(transaction=False)
            pipe.hset(key, "head", cast(Any, head))
            if gone:
                pipe.hdel(key, *gone)
            pipe.hlen(key)
            pipe.pexpire(key, self._ttl_ms)
            pipe.sadd(self._names, self._router)
            pipe.srandmember(self._names, MOST_ROUTERS)
            *_, count, _, joined, names = answers = pipe.execute(raise_on_error=False)
            raise_others(answers)
        if isinstance(names, list):
            self._routers = max(1, len(names))
        for field in gone:
            del self._written[field]
        if is_strange(joined):
            self._unlink(self._names)
        if is_strange(joined) or count != len(self._written) + 1:
            self._begin_anew(key)
            return False
        return True

    def _part(self, fields: Mapping[str, Pages]) -> dict[str, Pages]:
        """Return the first of a view's fields that come to this router's part of all pages."""
        room = self._pages_of_all // self._routers
        part: dict[str, Pages] = {}
        for field, pages in fields.items():
            room -= len(pages)
            if room < 0:
                break
            part[field] = pages
        return part

    def _begin_anew(self, key: str) -> None:
        self._written.clear()
        with translated():
            self._client.unlink(key)

    def _changed(self, fields: Mapping[str, Pages]) -> Iterator[dict[str, bytes]]:
        """Yield pages that are not written yet, so many at a time as Redis takes at once."""
        some: dict[str, bytes] = {}
        pages, room = 0, _PAGES_A_CALL
        for field in _longest_ago(fields, self._written):
            keys = fields[field]
            if self._written.get(field) == _ref(keys):
                continue
            room -= len(keys)
            if room < 0:
                break
            if some and pages + len(keys) > _PAGES_AT_ONCE:
                yield some
                some, pages = {}, 0
            some[field] = b"".join(keys)
            pages += len(keys)
        if some:
            yield some

    def _head(self, view: RouterView) -> _Head:
        written, none = self._written, _Ref()
        return _Head(
            tuple(
                _Group(
                    one.group,
                    one.uses_per_s,
                    written.get(f"g{one.group.hex()}", none) if one.chain else none,
                    one.model_root,
                    one.tenant_tag,
                    one.session_tag,
                    one.root,
                )
                for one in view.groups
            ),
            tuple(
                _Session(
                    one.tag,
                    one.place,
                    written.get(f"s{one.tag}", none) if one.pages else none,
                    one.used_s,
                    one.is_running,
                    one.came_from,
                    one.moved_s,
                    one.shared,
                    one.model_root,
                    one.tenant_tag,
                )
                for one in view.sessions
            ),
        )

    def _listed(self) -> list[str]:
        """Return the names of other routers that may have a view."""
        with translated():
            pipe = self._client.pipeline(transaction=False)
            # Not all, which may be any number: what has no view is taken out, and others have their turn.
            pipe.srandmember(self._names, MOST_ROUTERS + 1)
            (answer,) = pipe.execute(raise_on_error=False)
            raise_others([answer])
        if is_strange(answer):
            self._unlink(self._names)
            return []
        names = sorted(name.decode(errors="replace") for name in cast(list[bytes], answer))
        return [name for name in names if name != self._router][:MOST_ROUTERS]

    def _small(self, names: Sequence[str]) -> list[str]:
        """Return those whose heads are of a size that routers write."""
        with translated():
            pipe = self._client.pipeline(transaction=False)
            for name in names:
                pipe.hstrlen(self._view + name, "head")
            sizes = pipe.execute(raise_on_error=False)
            raise_others(sizes)
        return [
            name
            for name, size in zip(names, sizes, strict=True)
            if isinstance(size, int) and 0 < size <= _MOST_HEAD_BYTES
        ]

    def _in_turn(self, heads: Mapping[str, _Head]) -> list[str]:
        """Return whose pages are read, in order: another one is first each time, since there may be room for no more."""
        names = sorted(heads)
        at = bisect(names, self._begun_with) % max(1, len(names))
        names = names[at:] + names[:at]
        self._begun_with = names[0] if names else ""
        return names

    def _fetch(self, name: str, head: _Head, room: int) -> int:
        """Read pages of another router's view that are not known yet; return how many."""
        known = self._read[name]
        refs = {f"g{one.group.hex()}": one.chain for one in head.groups if one.chain.count}
        refs |= {f"s{one.tag}": one.pages for one in head.sessions if one.pages.count}
        for field in [field for field in known if field not in refs]:
            del known[field]
        wanted = [field for field, ref in refs.items() if _ref(known.get(field, ())) != ref]
        wanted = _longest_ago(wanted, known)
        read = 0
        while wanted:
            some: list[str] = []
            pages = 0
            while wanted and (not some or pages + refs[wanted[0]].count <= _PAGES_AT_ONCE):
                pages += refs[wanted[0]].count
                some.append(wanted.pop(0))
            if read + pages > room:
                break
            read += pages
            with translated():
                raws = cast(list[bytes | None], self._client.hmget(self._view + name, some))
            for field, raw in zip(some, raws, strict=True):
                known.pop(field, None)
                known[field] = _pages(raw)
        return read

    @staticmethod
    def _seen(head: _Head, pages: Mapping[str, Pages]) -> RouterView:
        """Return a view as it was told, without conversations whose pages are not there yet."""
        sessions = [
            SeenSession(
                one.tag,
                PlaceId(one.place),
                pages[f"s{one.tag}"],
                one.used_s,
                one.is_running,
                None if one.came_from is None else PlaceId(one.came_from),
                one.moved_s,
                one.shared,
                one.model_root,
                one.tenant_tag,
            )
            for one in head.sessions
            if pages.get(f"s{one.tag}")
        ]
        groups = [
            SeenGroup(
                PageKey(one.group),
                one.uses_per_s,
                pages.get(f"g{one.group.hex()}", ()) if one.chain.count else (),
                one.model_root,
                one.tenant_tag,
                one.session_tag,
                one.root,
            )
            for one in head.groups
        ]
        return bounded(RouterView(tuple(groups), tuple(sessions)))

    def _new_moves(self) -> list[Move]:
        """Return the moves since the last call."""
        with translated():
            pipe = self._client.pipeline(transaction=False)
            if self._heard:
                pipe.xrange(self._moves, min=f"({self._heard}", count=MOST_MOVES)
            else:
                pipe.xrevrange(self._moves, count=1)
            (answer,) = pipe.execute(raise_on_error=False)
            raise_others([answer])
        entries = [] if is_strange(answer) else cast(list[tuple[bytes, dict[bytes, bytes]]], answer)
        is_first, self._heard = not self._heard, self._heard or "0-0"
        if entries:
            self._heard = entries[-1][0].decode()
        return [] if is_first else [_move(fields) for _, fields in entries]

    def _unlink(self, key: str) -> None:
        log.warning("%s held what no router has written there; it is made anew", key)
        with translated():
            self._client.unlink(key)


def _longest_ago(fields: Iterable[str], done: Iterable[str]) -> list[str]:
    """Return fields that were not done yet, and then the others from the one done longest ago on."""
    rank = {field: at for at, field in enumerate(done)}
    return sorted(fields, key=lambda field: rank.get(field, -1))


def _ref(pages: Pages) -> _Ref:
    return _Ref(len(pages), bytes(pages[-1])) if pages else _Ref()


def _pages(raw: bytes | None) -> Pages:
    raw = (raw or b"")[: MOST_SESSION_PAGES * _KEY_BYTES]
    return tuple(
        PageKey(raw[at : at + _KEY_BYTES]) for at in range(0, len(raw) - _KEY_BYTES + 1, _KEY_BYTES)
    )


def _decoded(raw: object) -> _Head | None:
    """Return a head as it was written; None where it is none."""
    if not isinstance(raw, bytes):
        return None
    try:
        return msgspec.msgpack.decode(raw, type=_Head)
    except (ValueError, RecursionError):
        return None


def _move(fields: Mapping[bytes, bytes]) -> Move:
    tag, place = fields.get(b"tag", b""), fields.get(b"place", b"")
    return Move(tag.decode(errors="replace"), PlaceId(place.decode(errors="replace")))
