"""Sealing: a page's bytes are made for rest, and read back.

Covers packing and encrypting payloads into page files, as the disk and the object tier keep them, and
what that saves and costs. Does not cover what a page file looks like (`pie.page.format`) or where it
lies (`pie.pool.folder`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from typing_extensions import Buffer

from pie.page.cipher import KeyRing, locked
from pie.page.codec import Codec, pack
from pie.page.errors import BadPage, BadPageReason
from pie.page.events import Part
from pie.page.format import FileHeader, decode_head, decode_page, page_chunks
from pie.page.header import PageHeader
from pie.page.key import PageKey, RootKey
from pie.pool.codec_choice import CodecChoice
from pie.pool.settings import Compression

log = logging.getLogger("pie.pool.sealing")

_MOST_KINDS = 256
"""Model roots and parts of which it is known how well they pack; models come and go."""
_MOST_LOGGED = 16
"""Foreign keys that get a line in the log each."""


class Sealed(NamedTuple):
    """A page file in pieces, as it is written."""

    chunks: list[memoryview]
    packed_bytes: int
    """Of the payload in it."""
    key_id: bytes | None
    """Which key it is encrypted with; None where it is not."""

    @property
    def file_bytes(self) -> int:
        """Size of the file."""
        return sum(chunk.nbytes for chunk in self.chunks)


@dataclass(slots=True)
class SealingCounters:
    """What sealing has saved and cost since the start."""

    raw_bytes: int = 0
    """Of payloads that were sealed, as they came."""
    packed_bytes: int = 0
    """Of the same payloads, as they were written."""
    opened_bytes: int = 0
    """Of payloads that were read back, as they were given out."""
    seal_s: float = 0.0
    """Spent on packing and encrypting, trials that saved too little included."""
    open_s: float = 0.0
    """Spent on decrypting, unpacking and checking."""
    locked: int = 0
    """Pages that were asked for or found, and are encrypted with a key that is not here."""


class Sealing:
    """How one tier makes page files and reads them. Thread-safe."""

    def __init__(
        self,
        secret: bytes | None = None,
        *,
        compression: Compression = Compression.NONE,
        keys: Sequence[bytes] = (),
        name: str = "pages at rest",
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Prepare.

        Args:
            secret: The cluster's secret of 32 bytes, where pages are keyed with one.
            compression: How payloads are packed.
            keys: Master keys of 32 bytes: the first encrypts, all decrypt; none encrypts nothing.
                Pages that are not encrypted are read in any case.
            name: What log lines call it.
            timer: Seconds, for the counters alone.
        """
        self.secret = secret
        self.counters = SealingCounters()
        self.pages_by_codec: Counter[str] = Counter({codec.value: 0 for codec in Codec})
        """Pages that were sealed, by what they were packed with."""
        self._compression = compression
        self._keys = KeyRing(keys) if keys else None
        self._name = name
        self._timer = timer
        self._choices: dict[tuple[RootKey, Part], CodecChoice] = {}
        self._logged: set[str] = set()
        self._lock = threading.Lock()

    def seal(self, header: PageHeader, payload: Buffer) -> Sealed:
        """Return the page file of a raw payload, which is one of its pieces where nothing is done.

        Raises:
            ValueError: The payload is packed already, or is of another size.
        """
        began_s = self._timer()
        if memoryview(payload).nbytes != header.raw_bytes:
            raise ValueError(f"{memoryview(payload).nbytes} bytes do not fit {header}")
        codec, packed = self._packed(header, payload)
        chunks = page_chunks(header, packed, codec=codec, secret=self.secret, keys=self._keys)
        size = memoryview(packed).nbytes
        with self._lock:
            self.counters.raw_bytes += header.raw_bytes
            self.counters.packed_bytes += size
            self.counters.seal_s += self._timer() - began_s
            self.pages_by_codec[codec.value] += 1
        return Sealed(chunks, size, None if self._keys is None else self._keys.writes_with)

    def open(
        self, file: Buffer, *, key: PageKey | None = None, part: Part | None = None
    ) -> tuple[PageHeader, memoryview]:
        """Return the header and the raw payload of a page file, both checked.

        The payload is a view into `file` where nothing was done to it.

        Args:
            file: All bytes of the file.
            key: The page that is wanted, where that is known.
            part: Its part.

        Raises:
            BadPage: It is not that page; or it is `LOCKED`: not damaged, and to be left alone.
        """
        began_s = self._timer()
        try:
            header, payload = decode_page(
                file, secret=self.secret, keys=self._keys, key=key, part=part
            )
        except BadPage as error:
            if error.reason is BadPageReason.LOCKED:
                self._found_locked(error.detail)
            raise
        with self._lock:
            self.counters.opened_bytes += header.raw_bytes
            self.counters.open_s += self._timer() - began_s
        return header, payload

    def open_head(self, head: Buffer, file_bytes: int) -> FileHeader:
        """Return what a page file says of itself, from its first `HEAD_BYTES`.

        Raises:
            BadPage: It does not begin like a page, or is too short. One whose key is not here is
                none: see `is_locked`.
        """
        return decode_head(head, file_bytes, secret=self.secret)

    def reads(self, key_id: bytes | None) -> bool:
        """Say whether what is encrypted with a key, or with none, can be read here."""
        return key_id is None or (self._keys is not None and key_id in self._keys)

    def is_locked(self, key_id: bytes | None) -> bool:
        """Say whether a page that was found is encrypted with a key that is not here.

        Counted, and told once in the log for each key.
        """
        if key_id is None or self.reads(key_id):
            return False
        self._found_locked(locked(key_id).detail)
        return True

    def _packed(self, header: PageHeader, payload: Buffer) -> tuple[Codec, Buffer]:
        """Pack a payload as well as it is worth."""
        if self._compression is Compression.NONE:
            return Codec.NONE, payload
        if self._compression is not Compression.AUTO:
            codec = Codec(self._compression.value)
            packed = pack(payload, codec, header.dtype)
            if memoryview(packed).nbytes < header.raw_bytes:
                return codec, packed
            return Codec.NONE, payload
        with self._lock:
            choice = self._choice(header)
            to_try = choice.to_try()
        tried = {codec: pack(payload, codec, header.dtype) for codec in to_try}
        sizes = {codec: memoryview(packed).nbytes for codec, packed in tried.items()}
        with self._lock:
            codec = choice.learn(header.raw_bytes, sizes)
        return codec, tried.get(codec, payload)

    def _choice(self, header: PageHeader) -> CodecChoice:
        kind = (header.model_root, header.part)
        choice = self._choices.get(kind)
        if choice is None:
            if len(self._choices) >= _MOST_KINDS:
                del self._choices[next(iter(self._choices))]
            choice = self._choices[kind] = CodecChoice()
        return choice

    def _found_locked(self, detail: str) -> None:
        with self._lock:
            self.counters.locked += 1
            told = detail in self._logged or len(self._logged) >= _MOST_LOGGED
            if not told:
                self._logged.add(detail)
        if not told:
            log.warning(
                "%s: a page is a miss, and so are all others like it: %s. Their files stay until "
                "their room is needed",
                self._name,
                detail,
            )
