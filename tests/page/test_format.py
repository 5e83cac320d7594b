"""Page files: what goes in comes out, and nothing else ever does."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings, strategies as st

from pie.page import format as page_format
from pie.page.codec import Codec
from pie.page.errors import BadPage, BadPageReason
from pie.page.events import Part
from pie.page.format import decode_header, decode_page, encode_page, page_name, parse_page_name
from pie.page.header import FORMAT_VERSION, PageHeader, check_payload, checksum
from pie.page.key import PageKey, RootKey

SECRET = b"s" * 32
KEY = PageKey(b"k" * 32)
PAYLOAD = bytes(100) + bytes(range(157)) + bytes(100)

secrets = st.sampled_from([None, SECRET])
codecs = st.sampled_from(Codec)
payloads = st.binary(max_size=300) | st.binary(max_size=40).map(lambda piece: piece * 30)


def header_of(payload: bytes, secret: bytes | None = None, **fields: Any) -> PageHeader:
    plain = PageHeader(
        key=KEY,
        parent=b"p" * 32,
        index=3,
        part=Part.WINDOW,
        model_root=RootKey(b"r" * 32),
        dtype="bfloat16",
        layout_id="layout",
        page_tokens=16,
        raw_bytes=len(payload),
        checksum=checksum(payload, secret),
        tenant_tag="ténant",
    )
    return msgspec.structs.replace(plain, **fields)


def file_of(
    payload: bytes = PAYLOAD, codec: Codec = Codec.NONE, secret: bytes | None = None
) -> bytes:
    return bytes(encode_page(header_of(payload, secret), payload, codec=codec, secret=secret))


def reason_of(file: bytes, **wanted: Any) -> BadPageReason:
    with pytest.raises(BadPage) as caught:
        decode_page(file, **wanted)
    return caught.value.reason


@given(payloads, codecs, secrets, st.sampled_from(["bfloat16", "float32", "float16", "int4"]))
def test_a_page_is_read_as_it_was_written(
    payload: bytes, codec: Codec, secret: bytes | None, dtype: str
) -> None:
    header = header_of(payload, secret, dtype=dtype)
    file = encode_page(header, payload, codec=codec, secret=secret)
    found, raw = decode_page(file, secret=secret)
    assert (found, bytes(raw)) == (header, payload)
    assert decode_header(file, secret=secret) == header


@given(
    st.builds(
        PageHeader,
        key=st.binary(max_size=32).map(PageKey),
        parent=st.binary(max_size=32),
        index=st.integers(0, 2**40),
        part=st.sampled_from(Part),
        model_root=st.binary(max_size=32).map(RootKey),
        dtype=st.text(),
        layout_id=st.text(),
        page_tokens=st.integers(1, 4096),
        raw_bytes=st.just(len(PAYLOAD)),
        checksum=st.just(checksum(PAYLOAD)),
        shard=st.integers(0, 64),
        tenant_tag=st.text(),
    )
)
def test_every_field_of_a_header_survives(header: PageHeader) -> None:
    assert decode_page(encode_page(header, PAYLOAD)) == (header, memoryview(PAYLOAD))


@pytest.mark.parametrize("secret", [None, SECRET], ids=["plain", "secret"])
@pytest.mark.parametrize("codec", Codec)
def test_no_flipped_bit_gives_a_wrong_page(codec: Codec, secret: bytes | None) -> None:
    whole = file_of(codec=codec, secret=secret)
    wanted = (header_of(PAYLOAD, secret), memoryview(PAYLOAD))
    for at in range(len(whole)):
        for bit in (1, 16, 128):
            file = bytearray(whole)
            file[at] ^= bit
            try:
                found = decode_page(file, secret=secret)
            except BadPage:
                continue
            # Arrow's own padding and the second copy of the schema carry nothing.
            assert found == wanted


@pytest.mark.parametrize("codec", Codec)
def test_a_file_that_breaks_off_anywhere_is_truncated(codec: Codec) -> None:
    whole = file_of(codec=codec)
    for length in range(len(whole)):
        assert reason_of(whole[:length]) is BadPageReason.TRUNCATED


@settings(max_examples=300)
@given(st.binary(max_size=400), st.booleans())
def test_garbage_is_no_page(garbage: bytes, framed: bool) -> None:
    file = b"ARROW1\0\0" + garbage + b"ARROW1" if framed else garbage
    reason = reason_of(file)
    assert reason in (BadPageReason.NOT_A_PAGE, BadPageReason.TRUNCATED)


@given(st.data())
def test_a_burst_of_damage_gives_no_wrong_page(data: st.DataObject) -> None:
    whole = file_of(codec=data.draw(codecs))
    start = data.draw(st.integers(0, len(whole) - 1))
    burst = data.draw(st.binary(min_size=1, max_size=64))
    file = whole[:start] + burst + whole[start + len(burst) :]
    try:
        found = decode_page(file)
    except BadPage:
        return
    assert found == (header_of(PAYLOAD), memoryview(PAYLOAD))


def rewritten(change: dict[str, str], payload: bytes | None = None, sign: bool = True) -> bytes:
    """A well-formed Arrow file with other metadata, signed as if Pie had written it."""
    batch = pa.ipc.open_file(pa.py_buffer(file_of())).get_batch(0)
    fields = {k.decode()[4:]: v.decode() for k, v in batch.schema.metadata.items()} | change
    if sign:
        del fields["header_checksum"]
        fields["header_checksum"] = page_format._header_checksum(fields, None)
    if payload is not None:
        column = pa.array(np.frombuffer(payload, np.uint8))
        batch = pa.record_batch([column], schema=batch.schema)
    batch = batch.replace_schema_metadata({f"pie.{k}": v for k, v in fields.items()})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


@pytest.mark.parametrize(
    ("change", "sign", "reason"),
    [
        ({"version": str(FORMAT_VERSION + 1)}, True, BadPageReason.VERSION),
        ({"key": "00" * 32}, False, BadPageReason.HEADER),
        ({"checksum": checksum(b"other").hex()}, False, BadPageReason.HEADER),
        ({"tenant_tag": "other"}, False, BadPageReason.HEADER),
        ({"index": "three"}, True, BadPageReason.HEADER),
        ({"part": "half"}, True, BadPageReason.HEADER),
        ({"codec": "zip"}, True, BadPageReason.CODEC),
        ({"codec": "lz4"}, True, BadPageReason.CODEC),
        ({"codec": "lz4", "raw_bytes": str(2**50)}, True, BadPageReason.CODEC),
        ({"raw_bytes": "9"}, True, BadPageReason.CHECKSUM),
        ({"checksum": checksum(b"other").hex()}, True, BadPageReason.CHECKSUM),
        ({"checksum_kind": "blake3-keyed"}, True, BadPageReason.FOREIGN),
    ],
)
def test_a_header_that_lies_is_told_apart(
    change: dict[str, str], sign: bool, reason: BadPageReason
) -> None:
    assert reason_of(rewritten(change, sign=sign)) is reason


def test_another_pages_payload_is_refused() -> None:
    assert reason_of(rewritten({}, payload=b"x" * len(PAYLOAD))) is BadPageReason.CHECKSUM


def test_an_arrow_file_that_is_no_page_is_refused() -> None:
    sink = pa.BufferOutputStream()
    table = pa.table({"payload": [1, 2]})
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    assert reason_of(sink.getvalue().to_pybytes()) is BadPageReason.VERSION


def test_the_wrong_page_is_refused() -> None:
    file = file_of()
    assert decode_page(file, key=KEY, part=Part.WINDOW)[0].key == KEY
    assert reason_of(file, key=PageKey(b"o" * 32)) is BadPageReason.WRONG_PAGE
    assert reason_of(file, part=Part.FULL) is BadPageReason.WRONG_PAGE


def test_a_page_from_another_cluster_is_refused() -> None:
    assert reason_of(file_of(), secret=SECRET) is BadPageReason.FOREIGN
    assert reason_of(file_of(secret=SECRET)) is BadPageReason.FOREIGN
    assert reason_of(file_of(secret=SECRET), secret=b"t" * 32) is BadPageReason.HEADER


def test_a_mapped_file_is_read_without_a_copy(tmp_path: Path) -> None:
    payload = os.urandom(1 << 16)
    path = tmp_path / "page"
    path.write_bytes(file_of(payload))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        _, raw = decode_page(mapped)
        start = np.frombuffer(mapped, np.uint8).ctypes.data
        address = np.frombuffer(raw, np.uint8).ctypes.data
        assert start < address < start + len(mapped)
        assert address % 8 == 0
        assert raw == payload
        del raw


def test_a_file_lies_about_nothing_to_other_readers() -> None:
    reader = pa.ipc.open_file(pa.py_buffer(file_of()))
    assert reader.num_record_batches == 1
    assert reader.get_batch(0).column("payload").to_numpy().tobytes() == PAYLOAD
    assert reader.schema.metadata[b"pie.key"] == KEY.hex().encode()


def test_shuffling_packs_numbers_better() -> None:
    values = np.random.default_rng(0).normal(size=8192).astype(np.float32)
    payload = (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    header = header_of(payload, dtype="bfloat16")
    plain = encode_page(header, payload, codec=Codec.LZ4)
    shuffled = encode_page(header, payload, codec=Codec.BSHUF_LZ4)
    assert shuffled.nbytes < 0.95 * plain.nbytes


def test_a_codec_that_packs_nothing_gives_way() -> None:
    payload = os.urandom(4096)
    assert file_of(payload, Codec.LZ4) == file_of(payload)


def test_a_payload_of_another_size_is_not_written() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        encode_page(header_of(b"abc"), b"abcd")
    with pytest.raises(ValueError, match="do not fit"):
        encode_page(header_of(b"abc", codec="lz4"), b"abc")


def test_a_payload_beside_its_header_is_checked() -> None:
    check_payload(header_of(PAYLOAD), memoryview(PAYLOAD))
    for bad in (PAYLOAD[:-1], b"x" + PAYLOAD[1:]):
        with pytest.raises(BadPage, match="checksum"):
            check_payload(header_of(PAYLOAD), memoryview(bad))


@pytest.mark.parametrize("part", Part)
def test_a_name_leads_back_to_its_page(part: Part) -> None:
    root, key = RootKey(bytes(range(32))), PageKey(bytes(range(100, 132)))
    name = page_name(root, key, part)
    assert name == f"{root.hex()}/64/{key.hex()}.{part.name.lower()}"
    assert parse_page_name(name) == (root, key, part)


@pytest.mark.parametrize("change", ["", "x", "..", "/"])
def test_other_names_are_not_pages(change: str) -> None:
    name = page_name(RootKey(b"r" * 32), KEY, Part.FULL)
    assert parse_page_name(name + change) == (parse_page_name(name) if not change else None)
    assert parse_page_name(name.replace("/6b/", "/6c/")) is None
    assert parse_page_name(name.upper()) is None
