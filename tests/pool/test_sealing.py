"""Sealed pages are read back as they were, and what that saved and cost is counted."""

from __future__ import annotations

import logging
import random

import msgspec
import numpy as np
import pytest

from pie.page.errors import BadPage, BadPageReason
from pie.page.format import HEAD_BYTES
from pie.page.header import PageHeader
from pie.page.key import RootKey
from pie.pool.checksum import Checksum
from pie.pool.conformance import sample_page
from pie.pool.sealing import Sealed, Sealing
from pie.pool.settings import Compression

SECRET = b"s" * 32
KEY, OTHER = b"k" * 32, b"o" * 32


def smooth_page(number: int, size: int = 40_000) -> tuple[PageHeader, bytes]:
    """Return a page of numbers that are alike, as keys and values are; noise is `sample_page`."""
    chance = np.random.default_rng(number)
    payload = chance.normal(1.0, 0.001, size // 4).astype(np.float32).tobytes()
    header = sample_page(number, size)[0]
    return with_payload(header, payload), payload


def with_payload(header: PageHeader, payload: bytes) -> PageHeader:
    """Return a header for another payload of the same size."""
    return msgspec.structs.replace(header, checksum=Checksum().digest(payload))


def joined(sealed: Sealed) -> bytes:
    file = b"".join(sealed.chunks)
    assert len(file) == sealed.file_bytes
    return file


@pytest.mark.parametrize("compression", Compression)
@pytest.mark.parametrize("keys", [(), (KEY,)])
@pytest.mark.parametrize("size", [1, 40_000, 200_000])
def test_a_page_comes_back_as_it_was(
    compression: Compression, keys: tuple[bytes, ...], size: int
) -> None:
    sealing = Sealing(compression=compression, keys=keys)
    for header, payload in (smooth_page(1, size - size % 4 or 4), sample_page(2, size)):
        file = joined(sealing.seal(header, payload))
        found, raw = sealing.open(file, key=header.key, part=header.part)
        assert (found, bytes(raw)) == (header, payload)
        assert sealing.open_head(file[:HEAD_BYTES], len(file)).header == header


def test_a_payload_that_nothing_is_done_to_is_not_copied() -> None:
    header, payload = sample_page(1, 100_000)
    chunks = Sealing().seal(header, payload).chunks
    assert any(chunk.obj is payload or chunk.nbytes == 100_000 for chunk in chunks)


def test_auto_packs_what_can_be_packed_and_leaves_noise_alone() -> None:
    sealing = Sealing(compression=Compression.AUTO)
    smooth = [sealing.seal(*smooth_page(n)) for n in range(20)]
    assert all(one.packed_bytes <= 36_000 for one in smooth)
    assert sealing.pages_by_codec["bshuf-lz4"] == 20

    noise = Sealing(compression=Compression.AUTO)
    assert all(noise.seal(*sample_page(n, 10_000)).packed_bytes == 10_000 for n in range(20))
    assert noise.pages_by_codec["none"] == 20


def test_models_and_parts_are_told_apart() -> None:
    sealing = Sealing(compression=Compression.AUTO)
    for number in range(300):
        header, payload = sample_page(number, 100)
        other = msgspec.structs.replace(header, model_root=RootKey(number.to_bytes(32)))
        sealing.seal(other, payload)
    assert len(sealing._choices) <= 256


def test_bytes_and_seconds_are_counted() -> None:
    ticks = iter(range(100))
    sealing = Sealing(compression=Compression.LZ4, timer=lambda: float(next(ticks)))
    payload = bytes(10_000)
    header = with_payload(sample_page(1, 10_000)[0], payload)
    sealed = sealing.seal(header, payload)
    sealing.open(joined(sealed))
    counters = sealing.counters
    assert counters.raw_bytes == counters.opened_bytes == 10_000
    assert counters.packed_bytes == sealed.packed_bytes < 100
    assert counters.seal_s == counters.open_s == 1.0
    assert sealing.pages_by_codec == {"none": 0, "lz4": 1, "bshuf-lz4": 0}


def test_a_wrong_key_is_told_once_and_counted_each_time(caplog: pytest.LogCaptureFixture) -> None:
    header, payload = sample_page(1)
    file = joined(Sealing(keys=[KEY]).seal(header, payload))
    sealing = Sealing(keys=[OTHER], name="pool-7 disk")
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            with pytest.raises(BadPage) as caught:
                sealing.open(file)
            assert caught.value.reason is BadPageReason.LOCKED
        assert sealing.is_locked(sealing.open_head(file, len(file)).key_id)
    (line,) = caplog.messages
    assert "pool-7 disk" in line
    assert "key" in line
    assert sealing.counters.locked == 6


def test_a_payload_of_another_size_is_refused() -> None:
    header, payload = sample_page(1, 100)
    for compression in Compression:
        with pytest.raises(ValueError, match="99 bytes"):
            Sealing(compression=compression).seal(header, payload[:99])


def test_a_flipped_bit_is_found_whatever_was_done() -> None:
    chance = random.Random(5)
    for compression in Compression:
        for keys in ((), (KEY,)):
            sealing = Sealing(SECRET, compression=compression, keys=keys)
            header, payload = sample_page(1, 3_000, secret=SECRET)
            file = bytearray(joined(sealing.seal(header, payload)))
            for _ in range(40):
                at = chance.randrange(len(file))
                file[at] ^= 1
                try:
                    assert bytes(sealing.open(bytes(file))[1]) == payload
                except BadPage as error:
                    assert error.reason is not BadPageReason.LOCKED  # noqa: PT017
                file[at] ^= 1
