"""Which codec pages of one kind are packed with: learned from samples.

Covers the decision for pages of one model root and part, pure. Does not cover packing
(`pie.page.codec`) or fixed codecs (`pie.pool.sealing`).

Some pages are tried with all codecs, and what saves most is used from then on, if it saves a tenth.
After a number of pages some are tried again, because what pages hold may change. So pages that cannot
be packed pay for the attempt in 4 of 516 cases.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pie.page.codec import Codec

LEAST_SAVED = 0.1
"""Share of a payload; a codec that saves less costs more time than its room is worth."""

_SAMPLES = 4
_PAGES_BETWEEN = 512
_FAILURES = 8
"""Pages in a row of which the chosen codec saved too little: then the samples are out of date."""

_CODECS = (Codec.LZ4, Codec.BSHUF_LZ4)


class CodecChoice:
    """What is known of pages of one kind. Not thread-safe."""

    def __init__(self) -> None:
        self.codec = Codec.NONE
        """What is used between samples."""
        self._samples_left = _SAMPLES
        self._pages_left = 0
        self._failures = 0
        self._packed = dict.fromkeys(_CODECS, 0)
        self._raw = 0

    def to_try(self) -> Sequence[Codec]:
        """Return the codecs that the next page is packed with: all, the chosen one, or none."""
        if self._samples_left:
            return _CODECS
        return () if self.codec is Codec.NONE else (self.codec,)

    def learn(self, raw_bytes: int, packed_bytes: Mapping[Codec, int]) -> Codec:
        """Take in the sizes that a page was packed to, and return the codec that it is kept in.

        Args:
            raw_bytes: Size of the payload.
            packed_bytes: By codec, of those that `to_try` named for it.
        """
        if len(packed_bytes) == len(_CODECS):
            self._sampled(raw_bytes, packed_bytes)
        else:
            self._used(raw_bytes, packed_bytes)
        best = min(packed_bytes, key=packed_bytes.__getitem__, default=Codec.NONE)
        return best if _is_worth(packed_bytes.get(best, raw_bytes), raw_bytes) else Codec.NONE

    def _sampled(self, raw_bytes: int, packed_bytes: Mapping[Codec, int]) -> None:
        self._raw += raw_bytes
        for codec, size in packed_bytes.items():
            self._packed[codec] += size
        self._samples_left = max(0, self._samples_left - 1)
        if self._samples_left:
            return
        best = min(_CODECS, key=self._packed.__getitem__)
        self.codec = best if _is_worth(self._packed[best], self._raw) else Codec.NONE
        self._packed = dict.fromkeys(_CODECS, 0)
        self._raw = self._failures = 0
        self._pages_left = _PAGES_BETWEEN

    def _used(self, raw_bytes: int, packed_bytes: Mapping[Codec, int]) -> None:
        self._pages_left -= 1
        failed = any(not _is_worth(size, raw_bytes) for size in packed_bytes.values())
        self._failures = self._failures + 1 if failed else 0
        if self._pages_left <= 0 or self._failures >= _FAILURES:
            self._samples_left = self._samples_left or _SAMPLES


def _is_worth(packed_bytes: int, raw_bytes: int) -> bool:
    return packed_bytes <= raw_bytes * (1 - LEAST_SAVED)
