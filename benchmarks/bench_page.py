"""Pages: keys of a long prompt, checksums, page files."""

from __future__ import annotations

import random
import statistics
import time
from array import array
from collections.abc import Callable

import numpy as np

from pie.page.codec import Codec
from pie.page.events import Part
from pie.page.format import decode_page, encode_page
from pie.page.header import PageHeader, checksum
from pie.page.key import PageKey, RootKey, page_keys

TOKENS = 32_768
PAGE_TOKENS = 16
PAYLOAD_BYTES = 1 << 20
SECRET = b"s" * 32
REPEATS = 25


def run() -> dict[str, object]:
    """Return nanoseconds a token and gigabytes a second; medians of 25 runs."""
    root = RootKey(b"r" * 32)
    ids = [random.randrange(50_000) for _ in range(TOKENS)]
    packed = array("I", ids)
    # Numbers as a bfloat16 cache holds them.
    values = np.random.default_rng(0).normal(size=PAYLOAD_BYTES // 2).astype(np.float32)
    payload = (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return {
        "keys_ns_per_token_of_list": _seconds(lambda: page_keys(root, ids, PAGE_TOKENS))
        / TOKENS
        * 1e9,
        "keys_ns_per_token_of_array": _seconds(lambda: page_keys(root, packed, PAGE_TOKENS))
        / TOKENS
        * 1e9,
        "xxh3_gb_per_s": _rate(lambda: checksum(payload)),
        "blake3_gb_per_s": _rate(lambda: checksum(payload, SECRET)),
        "file_1mib": {codec.value: _file(payload, codec) for codec in Codec},
    }


def _file(payload: bytes, codec: Codec) -> dict[str, float]:
    header = PageHeader(
        PageKey(b"k" * 32),
        b"p" * 32,
        0,
        Part.FULL,
        RootKey(b"r" * 32),
        "bfloat16",
        "layout",
        PAGE_TOKENS,
        len(payload),
        checksum(payload),
    )
    file = encode_page(header, payload, codec=codec)
    return {
        "bytes": file.nbytes,
        "encode_gb_per_s": _rate(lambda: encode_page(header, payload, codec=codec)),
        "decode_gb_per_s": _rate(lambda: decode_page(file)),
    }


def _rate(call: Callable[[], object]) -> float:
    return round(PAYLOAD_BYTES / _seconds(call) / 1e9, 3)


def _seconds(call: Callable[[], object]) -> float:
    figures = []
    for _ in range(REPEATS):
        start_s = time.perf_counter()
        call()
        figures.append(time.perf_counter() - start_s)
    return statistics.median(figures)
