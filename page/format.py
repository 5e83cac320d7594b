"""A page's file.

Covers the Arrow IPC file that the disk tier and the object tier share. Does not cover what is known of
a page, in a file or on the wire (`pie.page.header`), or where files lie (`pie.pool`).

A page file holds one record batch with one column of bytes, `payload`, and says all that is known
of the page in its schema's metadata, so that any Arrow reader can look into it. The checksum in
the header covers the raw payload; a second one, `header_checksum`, covers the header with the
payload's checksum, so that neither can be changed or exchanged unnoticed.

The payload may be encrypted (`pie.page.cipher`). The header stays readable, so that pages can be
listed without the key, and is authenticated with the payload.
"""

from __future__ import annotations

import hmac
import re
from typing import Final, NamedTuple

import msgspec
import pyarrow as pa
from typing_extensions import Buffer

from pie.page.cipher import CIPHER, Encrypted, KeyRing, locked
from pie.page.codec import Codec, pack, unpack
from pie.page.errors import BadPage, BadPageReason
from pie.page.events import Part
from pie.page.header import (
    FORMAT_VERSION,
    PageHeader,
    check_payload,
    checksum,
)
from pie.page.key import KEY_BYTES, PageKey, RootKey

HEAD_BYTES = 4096
"""Within so many first bytes lies a page file's header."""

_MAGIC = b"ARROW1"
_SCHEMA_AT = 8
_PREFIX = "pie."
_XXH3: Final = "xxh3-128"
_BLAKE3: Final = "blake3-keyed"
_CIPHER_FIELDS = frozenset({"cipher", "key_id", "nonce"})
_FIELD = pa.field("payload", pa.uint8(), nullable=False)


class FileHeader(NamedTuple):
    """What a page file says of itself in the clear."""

    header: PageHeader
    codec: Codec = Codec.NONE
    """How the payload in the file is packed."""
    key_id: bytes | None = None
    """Which key the payload is encrypted with; None where it is not."""


def encode_page(
    header: PageHeader,
    payload: Buffer,
    *,
    codec: Codec = Codec.NONE,
    secret: bytes | None = None,
    keys: KeyRing | None = None,
) -> memoryview:
    """Return the page file of a raw payload.

    Args:
        header: What is known of the page; its `checksum` was made with the same `secret`.
        payload: `header.raw_bytes` bytes.
        codec: How the file packs the payload; one that packs nothing gives way to `none`.
        secret: The cluster's secret, where it has one.
        keys: The payload is encrypted with the first of them.

    Raises:
        ValueError: The payload is packed already, or is of another size.
    """
    raw_bytes = memoryview(payload).nbytes
    if raw_bytes != header.raw_bytes:
        raise ValueError(f"{raw_bytes} bytes do not fit {header}")
    packed = pack(payload, codec, header.dtype)
    if memoryview(packed).nbytes >= header.raw_bytes:
        packed, codec = payload, Codec.NONE
    sink = pa.BufferOutputStream()
    _write(sink, header, packed, codec, secret, keys)
    return memoryview(sink.getvalue()).cast("B")


def page_chunks(
    header: PageHeader,
    packed: Buffer,
    *,
    codec: Codec = Codec.NONE,
    secret: bytes | None = None,
    keys: KeyRing | None = None,
) -> list[memoryview]:
    """Return the page file of a payload that `codec` has packed, in pieces.

    For `writev`: the same bytes as `encode_page`, and the payload is one of the pieces, without a
    copy where it is not encrypted.

    Raises:
        ValueError: The header is of a packed payload, or a payload that is not packed is of
            another size.
    """
    sink = _Chunks()
    _write(pa.PythonFile(sink, mode="w"), header, packed, codec, secret, keys)
    return sink.chunks


def decode_page(
    file: Buffer,
    *,
    secret: bytes | None = None,
    keys: KeyRing | None = None,
    key: PageKey | None = None,
    part: Part | None = None,
) -> tuple[PageHeader, memoryview]:
    """Return the header and the raw payload of a page file, both checked.

    The payload is a view into `file`, such as a memory map, where the file's codec is `none` and it
    is not encrypted.

    Args:
        file: All bytes of the file.
        secret: The cluster's secret, where it has one.
        keys: What encrypted pages are read with; others are read without.
        key: The page that is wanted, where that is known.
        part: Its part.

    Raises:
        BadPage: It is not a page, not a whole one, not the one that is wanted, or `LOCKED`.
    """
    reader, fields = _open(file, secret)
    header, codec, _ = _described(fields)
    if (key is not None and header.key != key) or (part is not None and header.part is not part):
        detail = f"this is {header.key.hex()}, {header.part.name.lower()}"
        raise BadPage(BadPageReason.WRONG_PAGE, detail)
    packed = _decrypted(_payload(reader), header, fields, keys)
    payload = unpack(packed, codec, header.dtype, header.raw_bytes)
    check_payload(header, payload, secret)
    return header, payload


def decode_header(file: Buffer, *, secret: bytes | None = None) -> PageHeader:
    """Return the header of a page file, checked; its payload is not looked at.

    Raises:
        BadPage: It is not a page, or not a whole one.
    """
    return _described(_open(file, secret)[1]).header


def decode_head(head: Buffer, file_bytes: int, *, secret: bytes | None = None) -> FileHeader:
    """Return what a page file says of itself, checked, from the file's first `HEAD_BYTES` alone.

    Args:
        head: The first bytes.
        file_bytes: Size of the whole file; its other bytes are not looked at.
        secret: The cluster's secret, where it has one.

    Raises:
        BadPage: It does not begin like a page, or is too short for its payload.
    """
    view = memoryview(head).cast("B")
    if bytes(view[: len(_MAGIC)]) != _MAGIC:
        raise BadPage(BadPageReason.NOT_A_PAGE, "it does not begin like a page")
    try:
        schema = pa.ipc.read_schema(pa.py_buffer(view[_SCHEMA_AT:]))
    except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
        raise BadPage(BadPageReason.NOT_A_PAGE, str(error)) from None
    found = _described(_checked(schema, secret))
    if found.codec is Codec.NONE and file_bytes < found.header.raw_bytes:
        detail = f"{file_bytes} bytes cannot hold {found.header.raw_bytes}"
        raise BadPage(BadPageReason.TRUNCATED, detail)
    return found


def page_name(model_root: RootKey, key: PageKey, part: Part) -> str:
    """Return a page file's path below a tier's folder or prefix."""
    name = key.hex()
    return f"{model_root.hex()}/{name[:2]}/{name}.{part.name.lower()}"


def parse_page_name(path: str) -> tuple[RootKey, PageKey, Part] | None:
    """Return what `page_name` was called with; None where it is not one of its names."""
    match = _NAME.fullmatch(path)
    if match is None:
        return None
    root, key = bytes.fromhex(match["root"]), bytes.fromhex(match["key"])
    return RootKey(root), PageKey(key), Part[match["part"].upper()]


_HEX_KEY = "[0-9a-f]{%d}" % (2 * KEY_BYTES)  # noqa: UP031 - braces of its own
_NAME = re.compile(
    rf"(?P<root>{_HEX_KEY})/(?P<kk>[0-9a-f]{{2}})/(?P<key>(?P=kk)[0-9a-f]{{{2 * KEY_BYTES - 2}}})"
    rf"\.(?P<part>{'|'.join(part.name.lower() for part in Part)})"
)


def _fields(header: PageHeader, codec: Codec) -> dict[str, str]:
    """Return a header as the metadata of a file."""
    group = {"group": header.group.hex()} if header.group else {}
    session = {"session_tag": header.session_tag} if header.session_tag else {}
    return (
        group
        | session
        | {
            "version": str(header.version),
            "key": header.key.hex(),
            "parent": header.parent.hex(),
            "index": str(header.index),
            "part": header.part.name.lower(),
            "shard": str(header.shard),
            "model_root": header.model_root.hex(),
            "dtype": header.dtype,
            "layout_id": header.layout_id,
            "page_tokens": str(header.page_tokens),
            "tenant_tag": header.tenant_tag,
            "codec": codec.value,
            "raw_bytes": str(header.raw_bytes),
            "checksum": header.checksum.hex(),
        }
    )


def _header(fields: dict[str, str]) -> PageHeader:
    return PageHeader(
        key=PageKey(bytes.fromhex(fields["key"])),
        parent=bytes.fromhex(fields["parent"]),
        index=int(fields["index"]),
        part=Part[fields["part"].upper()],
        model_root=RootKey(bytes.fromhex(fields["model_root"])),
        dtype=fields["dtype"],
        layout_id=fields["layout_id"],
        page_tokens=int(fields["page_tokens"]),
        raw_bytes=int(fields["raw_bytes"]),
        checksum=bytes.fromhex(fields["checksum"]),
        shard=int(fields["shard"]),
        tenant_tag=fields["tenant_tag"],
        version=int(fields["version"]),
        group=bytes.fromhex(fields.get("group", "")),
        session_tag=fields.get("session_tag", ""),
    )


def _joined(fields: dict[str, str]) -> bytes:
    """Return all fields, each with its length, so that no two headers are joined alike."""
    return msgspec.msgpack.encode(sorted(fields.items()))


def _header_checksum(fields: dict[str, str], secret: bytes | None) -> str:
    return checksum(_joined(fields), secret).hex()


def _page_identity(header: PageHeader) -> bytes:
    """Return what tells a page from all others, for the key that is its own."""
    return header.model_root + header.key + bytes([header.part]) + header.shard.to_bytes(4)


def _open(file: Buffer, secret: bytes | None) -> tuple[pa.RecordBatchFileReader, dict[str, str]]:
    """Open a file and check its header's fields."""
    _check_ends(memoryview(file))
    try:
        reader = pa.ipc.open_file(pa.BufferReader(pa.py_buffer(file)))
        schema = reader.schema
    except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
        raise BadPage(BadPageReason.NOT_A_PAGE, str(error)) from None
    return reader, _checked(schema, secret)


def _checked(schema: pa.Schema, secret: bytes | None) -> dict[str, str]:
    """Return what a schema's metadata say, checked, without the checksum."""
    try:
        fields = {
            name.decode().removeprefix(_PREFIX): text.decode()
            for name, text in (schema.metadata or {}).items()
            if name.decode().startswith(_PREFIX)
        }
    except ValueError as error:
        raise BadPage(BadPageReason.HEADER, str(error)) from None
    version = fields.get("version")
    if version != str(FORMAT_VERSION):
        raise BadPage(BadPageReason.VERSION, f"version {version}, not {FORMAT_VERSION}")
    kind = fields.get("checksum_kind")
    if kind != (_XXH3 if secret is None else _BLAKE3):
        raise BadPage(BadPageReason.FOREIGN, f"its checksums are {kind}")
    found = fields.pop("header_checksum", "")
    if not hmac.compare_digest(found.encode(), _header_checksum(fields, secret).encode()):
        raise BadPage(BadPageReason.HEADER, "the header is not the one that was written")
    return fields


def _described(fields: dict[str, str]) -> FileHeader:
    """Return what fields say that belong together."""
    try:
        header = _header(fields)
    except (KeyError, ValueError) as error:
        raise BadPage(BadPageReason.HEADER, str(error)) from None
    try:
        codec = Codec(fields["codec"])
        if fields.get("cipher", CIPHER) != CIPHER:
            raise BadPage(BadPageReason.CODEC, f"the cipher {fields['cipher']} is unknown")
        key_id = bytes.fromhex(fields["key_id"]) if "cipher" in fields else None
    except (KeyError, ValueError) as error:
        raise BadPage(BadPageReason.CODEC, str(error)) from None
    return FileHeader(header, codec, key_id)


def _decrypted(
    data: memoryview, header: PageHeader, fields: dict[str, str], keys: KeyRing | None
) -> memoryview:
    """Return the packed payload of a file, which may be encrypted."""
    if "cipher" not in fields:
        return data
    key_id = bytes.fromhex(fields["key_id"])
    if keys is None:
        raise locked(key_id)
    try:
        nonce = bytes.fromhex(fields["nonce"])
    except (KeyError, ValueError) as error:
        raise BadPage(BadPageReason.HEADER, str(error)) from None
    clear = {name: text for name, text in fields.items() if name not in _CIPHER_FIELDS}
    return keys.decrypt(
        Encrypted(key_id, nonce, data),
        tenant_tag=header.tenant_tag,
        page=_page_identity(header),
        header=_joined(clear),
    )


class _Chunks:
    """A file to Arrow: keeps what is written as it comes, buffers without a copy."""

    closed = False

    def __init__(self) -> None:
        self.chunks: list[memoryview] = []
        self._size = 0

    def write(self, data: Buffer) -> int:
        view = memoryview(data).cast("B")
        self.chunks.append(view)
        self._size += view.nbytes
        return view.nbytes

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        """Nothing waits."""

    def close(self) -> None:
        """Nothing is open."""


def _write(
    sink: pa.NativeFile,
    header: PageHeader,
    packed: Buffer,
    codec: Codec,
    secret: bytes | None,
    keys: KeyRing | None,
) -> None:
    """Write a page file whose payload is packed already."""
    size = memoryview(packed).nbytes
    if header.codec != Codec.NONE or (codec is Codec.NONE and size != header.raw_bytes):
        raise ValueError(f"{size} bytes, codec {header.codec}, do not fit {header}")
    fields = _fields(header, codec)
    fields["checksum_kind"] = _XXH3 if secret is None else _BLAKE3
    if keys is not None:
        encrypted = keys.encrypt(
            packed,
            tenant_tag=header.tenant_tag,
            page=_page_identity(header),
            header=_joined(fields),
        )
        packed = encrypted.data
        fields["cipher"] = CIPHER
        fields["key_id"] = encrypted.key_id.hex()
        fields["nonce"] = encrypted.nonce.hex()
    fields["header_checksum"] = _header_checksum(fields, secret)
    schema = pa.schema([_FIELD], {_PREFIX + name: text for name, text in fields.items()})
    buffer = pa.py_buffer(packed)
    column = pa.Array.from_buffers(pa.uint8(), buffer.size, [None, buffer], null_count=0)
    with pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(pa.record_batch([column], schema=schema))


def _check_ends(file: memoryview) -> None:
    view = file.cast("B") if file.nbytes else file
    if bytes(view[: len(_MAGIC)]) != _MAGIC[: view.nbytes]:
        raise BadPage(BadPageReason.NOT_A_PAGE, "it does not begin like a page")
    if view.nbytes < 2 * len(_MAGIC) or bytes(view[-len(_MAGIC) :]) != _MAGIC:
        raise BadPage(BadPageReason.TRUNCATED, f"it breaks off after {view.nbytes} bytes")


def _payload(reader: pa.RecordBatchFileReader) -> memoryview:
    """Return the packed payload, which nothing has checked yet."""
    try:
        if reader.num_record_batches != 1 or reader.schema.names != [_FIELD.name]:
            raise BadPage(BadPageReason.NOT_A_PAGE, "it does not hold one payload")
        column = reader.get_batch(0).column(0)
        column.validate()
    except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
        raise BadPage(BadPageReason.NOT_A_PAGE, str(error)) from None
    if column.type != pa.uint8() or column.offset or column.null_count:
        raise BadPage(BadPageReason.NOT_A_PAGE, f"its payload is {column.type}")
    buffer = column.buffers()[1]
    if buffer is None:
        return memoryview(b"")
    return memoryview(buffer).cast("B")[: len(column)]
