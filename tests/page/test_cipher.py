"""Encrypted pages: who has the key reads them, and nobody else reads or changes them."""

from __future__ import annotations

from typing import Any

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given, settings, strategies as st

from pie.page.cipher import Encrypted, KeyRing, key_id
from pie.page.codec import Codec
from pie.page.errors import BadPage, BadPageReason
from pie.page.format import (
    HEAD_BYTES,
    decode_head,
    decode_header,
    decode_page,
    encode_page,
    page_chunks,
)
from pie.page.header import PageHeader, checksum
from tests.page.test_format import PAYLOAD, SECRET, header_of

OLD, NEW = b"o" * 32, b"n" * 32
RING = KeyRing([NEW])
secrets = st.sampled_from([None, SECRET])


def file_of(payload: bytes = PAYLOAD, keys: KeyRing | None = RING, **fields: Any) -> bytes:
    return bytes(encode_page(header_of(payload, **fields), payload, keys=keys))


def reason_of(file: bytes, keys: KeyRing | None = RING) -> BadPageReason:
    with pytest.raises(BadPage) as caught:
        decode_page(file, keys=keys)
    return caught.value.reason


@given(st.binary(max_size=300), st.sampled_from(Codec), secrets)
def test_an_encrypted_page_is_read_as_it_was_written(
    payload: bytes, codec: Codec, secret: bytes | None
) -> None:
    header = header_of(payload, secret)
    file = encode_page(header, payload, codec=codec, secret=secret, keys=RING)
    found, raw = decode_page(file, secret=secret, keys=RING)
    assert (found, bytes(raw)) == (header, payload)


def test_pieces_are_the_whole_file() -> None:
    chunks = page_chunks(header_of(PAYLOAD), PAYLOAD, keys=RING)
    assert bytes(decode_page(b"".join(chunks), keys=RING)[1]) == PAYLOAD


def test_the_payload_cannot_be_seen_in_the_file() -> None:
    payload = b"a secret of sixteen tokens" * 40
    assert b"secret of" in file_of(payload, keys=None)
    assert b"secret of" not in file_of(payload)


def test_the_header_is_read_without_the_key() -> None:
    file = file_of()
    assert decode_header(file) == header_of(PAYLOAD)
    head = decode_head(file[:HEAD_BYTES], len(file))
    assert head.header == header_of(PAYLOAD)
    assert head.key_id == key_id(NEW)


def test_a_header_with_the_longest_names_fits_the_head() -> None:
    name = "x" * 128
    file = file_of(bytes(70_000), dtype=name, layout_id=name, tenant_tag=name)
    assert decode_head(file[:HEAD_BYTES], len(file)).header.layout_id == name
    assert len(file) - 70_000 <= HEAD_BYTES


def test_without_the_key_a_page_is_locked_and_not_bad() -> None:
    assert reason_of(file_of(), None) is BadPageReason.LOCKED
    assert reason_of(file_of(), KeyRing([OLD])) is BadPageReason.LOCKED


def test_the_first_key_writes_and_all_read() -> None:
    old = file_of(keys=KeyRing([OLD]))
    both = KeyRing([NEW, OLD])
    assert bytes(decode_page(old, keys=both)[1]) == PAYLOAD
    new = file_of(keys=both)
    assert decode_head(new, len(new)).key_id == key_id(NEW)
    assert reason_of(new, KeyRing([OLD])) is BadPageReason.LOCKED


def test_pages_that_are_not_encrypted_are_read_with_keys_too() -> None:
    plain = encode_page(header_of(PAYLOAD), PAYLOAD)
    assert bytes(decode_page(plain, keys=RING)[1]) == PAYLOAD


def test_no_two_files_of_a_page_are_alike() -> None:
    assert len({file_of() for _ in range(20)}) == 20


@pytest.mark.parametrize("field", ["tenant_tag", "page", "header"])
def test_a_payload_is_bound_to_its_tenant_page_and_header(field: str) -> None:
    mine = {"tenant_tag": "t", "page": b"p", "header": b"h"}
    other = mine | {field: "u" if field == "tenant_tag" else b"u"}
    sealed = RING.encrypt(PAYLOAD, **mine)  # type: ignore[arg-type]
    assert RING.decrypt(sealed, **mine) == PAYLOAD  # type: ignore[arg-type]
    with pytest.raises(BadPage, match="checksum"):
        RING.decrypt(sealed, **other)  # type: ignore[arg-type]


@settings(max_examples=200)
@given(st.data())
def test_a_changed_byte_is_found(data: st.DataObject) -> None:
    file = bytearray(file_of())
    at = data.draw(st.integers(0, len(file) - 1))
    file[at] ^= data.draw(st.integers(1, 255))
    try:
        header, payload = decode_page(bytes(file), keys=RING)
    except BadPage:
        return
    assert (header, bytes(payload)) == (header_of(PAYLOAD), PAYLOAD)  # A byte of padding.


def test_a_header_that_was_signed_anew_does_not_fit_its_payload() -> None:
    """The checksum of a header without a secret can be made by anybody; the cipher's tag cannot."""
    theirs = header_of(PAYLOAD, index=4)
    mine = pa.ipc.open_file(pa.py_buffer(file_of())).schema.metadata
    sealed = pa.ipc.open_file(pa.py_buffer(file_of())).get_batch(0).column(0).buffers()[1]
    ring = _Fixed(Encrypted(key_id(NEW), bytes.fromhex(mine[b"pie.nonce"].decode()), sealed))
    forged = bytes(encode_page(theirs, PAYLOAD, keys=ring))
    assert decode_header(forged).index == 4
    assert reason_of(forged) is BadPageReason.CHECKSUM


class _Fixed(KeyRing):
    """Writes what was encrypted for another header."""

    def __init__(self, sealed: Encrypted) -> None:
        super().__init__([NEW])
        self._sealed = sealed

    def encrypt(self, *_: object, **__: object) -> Encrypted:
        return self._sealed


@pytest.mark.parametrize("keys", [[], [b"short"], [NEW, b""]])
def test_keys_of_another_length_are_refused(keys: list[bytes]) -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        KeyRing(keys)


def test_many_tenants_do_not_make_the_ring_grow_for_ever() -> None:
    ring = KeyRing([NEW])
    for number in range(5_000):
        ring.encrypt(b"x", tenant_tag=str(number), page=b"p", header=b"h")
    (master,) = ring._masters.values()
    assert len(master._tenants) <= 4096


def test_the_checksum_of_the_payload_is_compared_after_decryption() -> None:
    header: PageHeader = msgspec.structs.replace(header_of(PAYLOAD), checksum=checksum(b"other"))
    assert reason_of(bytes(encode_page(header, PAYLOAD, keys=RING))) is BadPageReason.CHECKSUM
