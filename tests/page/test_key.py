"""Names of pages: golden vectors, an independent implementation, and what must never collide."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import given, strategies as st

from pie.page.key import (
    KEY_BYTES,
    KEY_VERSION,
    PageKey,
    RootKey,
    model_root,
    pack_tokens,
    page_keys,
    tenant_root,
    unpack_tokens,
)

GOLDEN = Path(__file__).parent.parent / "golden" / "keys.json"

token_ids = st.integers(0, 2**32 - 1)
tokens_lists = st.lists(token_ids, max_size=40)
names = st.none() | st.text(max_size=8)


def number(value: int, size: int) -> bytes:
    return bytes((value >> (8 * i)) & 0xFF for i in range(size))


def slow_root(*fields: tuple[str, bytes]) -> bytes:
    """The scheme as its words say it, with nothing shared with `pie.page.key`."""
    text = b"pie/root"
    for name, value in fields:
        text += number(len(name), 4) + name.encode() + number(len(value), 8) + value
    return blake3(text).digest()


def slow_model_root(fingerprint: bytes, dtype: str, page_tokens: int, layout_id: str) -> bytes:
    return slow_root(
        ("version", number(1, 4)),
        ("fingerprint", fingerprint),
        ("dtype", dtype.encode()),
        ("page_tokens", number(page_tokens, 4)),
        ("layout_id", layout_id.encode()),
    )


def slow_keys(root: bytes, tokens: list[int], page_tokens: int) -> list[bytes]:
    keys = []
    key = root
    while len(tokens) >= page_tokens:
        page, tokens = tokens[:page_tokens], tokens[page_tokens:]
        key = blake3(key + b"".join(number(token, 4) for token in page)).digest()
        keys.append(key)
    return keys


def golden_cases() -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = json.loads(GOLDEN.read_text())["cases"]
    return cases


@pytest.mark.parametrize("case", golden_cases(), ids=lambda case: case["name"])
def test_keys_are_the_golden_ones(case: dict[str, Any]) -> None:
    model = model_root(
        fingerprint=bytes.fromhex(case["fingerprint"]),
        dtype=case["dtype"],
        page_tokens=case["page_tokens"],
        layout_id=case["layout_id"],
    )
    root = tenant_root(model, adapter=case["adapter"], salt=case["salt"])
    assert model.hex() == case["model_root"]
    assert root.hex() == case["root"]
    keys = page_keys(root, case["tokens"], case["page_tokens"])
    assert [key.hex() for key in keys] == case["keys"]


def test_golden_file_is_for_this_version() -> None:
    assert json.loads(GOLDEN.read_text())["key_version"] == KEY_VERSION


@given(
    st.binary(max_size=40), st.sampled_from(["bfloat16", "float32"]), st.integers(1, 9), st.text()
)
def test_model_root_follows_the_scheme(
    fingerprint: bytes, dtype: str, page_tokens: int, layout_id: str
) -> None:
    made = model_root(
        fingerprint=fingerprint, dtype=dtype, page_tokens=page_tokens, layout_id=layout_id
    )
    assert made == slow_model_root(fingerprint, dtype, page_tokens, layout_id)


@given(tokens_lists, st.integers(1, 9))
def test_page_keys_follow_the_scheme(tokens: list[int], page_tokens: int) -> None:
    root = RootKey(b"r" * KEY_BYTES)
    assert page_keys(root, tokens, page_tokens) == slow_keys(root, tokens, page_tokens)


@given(tokens_lists, st.integers(1, 9))
def test_only_full_pages_have_keys(tokens: list[int], page_tokens: int) -> None:
    root = RootKey(b"r" * KEY_BYTES)
    keys = page_keys(root, tokens, page_tokens)
    assert len(keys) == len(tokens) // page_tokens
    whole = len(keys) * page_tokens
    assert page_keys(root, tokens[:whole], page_tokens) == keys


@given(tokens_lists, tokens_lists, st.integers(1, 9))
def test_chain_goes_on_from_any_page(head: list[int], tail: list[int], page_tokens: int) -> None:
    root = RootKey(b"r" * KEY_BYTES)
    head = head[: len(head) // page_tokens * page_tokens]
    first = page_keys(root, head, page_tokens)
    rest = page_keys(first[-1] if first else root, tail, page_tokens)
    assert first + rest == page_keys(root, head + tail, page_tokens)


@given(st.data())
def test_key_names_every_token_before_it(data: st.DataObject) -> None:
    root = RootKey(b"r" * KEY_BYTES)
    tokens = data.draw(st.lists(token_ids, min_size=12, max_size=12))
    at = data.draw(st.integers(0, 11))
    other = [*tokens]
    other[at] = data.draw(token_ids.filter(lambda token: token != tokens[at]))
    ours, theirs = page_keys(root, tokens, 4), page_keys(root, other, 4)
    assert ours[: at // 4] == theirs[: at // 4]
    assert not set(ours[at // 4 :]) & set(theirs)


@given(
    st.tuples(
        st.binary(max_size=8), st.text(max_size=8), st.integers(1, 2**31), st.text(max_size=8)
    ),
    st.tuples(
        st.binary(max_size=8), st.text(max_size=8), st.integers(1, 2**31), st.text(max_size=8)
    ),
)
def test_two_models_share_a_root_only_if_all_fields_are_equal(
    one: tuple[bytes, str, int, str], other: tuple[bytes, str, int, str]
) -> None:
    roots = [
        model_root(
            fingerprint=fields[0], dtype=fields[1], page_tokens=fields[2], layout_id=fields[3]
        )
        for fields in (one, other)
    ]
    assert (roots[0] == roots[1]) == (one == other)


@given(names, names, names, names)
def test_two_tenants_share_a_root_only_if_adapter_and_salt_are_equal(
    adapter: str | None, salt: str | None, other_adapter: str | None, other_salt: str | None
) -> None:
    model = RootKey(b"m" * KEY_BYTES)
    ours = tenant_root(model, adapter=adapter, salt=salt)
    theirs = tenant_root(model, adapter=other_adapter, salt=other_salt)
    assert (ours == theirs) == ((adapter, salt) == (other_adapter, other_salt))


def test_an_empty_salt_is_not_an_absent_one() -> None:
    model = RootKey(b"m" * KEY_BYTES)
    roots = {
        model,
        tenant_root(model, adapter=""),
        tenant_root(model, salt=""),
        tenant_root(model, adapter="", salt=""),
    }
    assert len(roots) == 4


def test_an_adapter_is_not_a_salt_of_the_same_spelling() -> None:
    model = RootKey(b"m" * KEY_BYTES)
    assert tenant_root(model, adapter="blue") != tenant_root(model, salt="blue")
    assert tenant_root(model, adapter="a", salt="b") != tenant_root(model, adapter="b", salt="a")


def test_fields_do_not_run_into_each_other() -> None:
    model = RootKey(b"m" * KEY_BYTES)
    assert tenant_root(model, adapter="ab", salt="c") != tenant_root(model, adapter="a", salt="bc")


@given(st.lists(token_ids, max_size=40))
def test_tokens_survive_packing(tokens: list[int]) -> None:
    packed = pack_tokens(tokens)
    assert packed == b"".join(number(token, 4) for token in tokens)
    assert pack_tokens(array("I", tokens)) == packed
    assert unpack_tokens(packed).tolist() == tokens


@pytest.mark.parametrize("token", [-1, 2**32])
def test_a_token_that_is_no_u32_is_refused(token: int) -> None:
    with pytest.raises(OverflowError):
        page_keys(PageKey(b"k" * KEY_BYTES), [token], 1)


def write_golden() -> None:
    """Write the golden file by the slow implementation; for a new `KEY_VERSION` only."""
    cases = []
    for name, dtype, page_tokens, layout, adapter, salt, tokens in [
        ("plain", "bfloat16", 16, "layout", None, None, list(range(48))),
        ("partial tail", "float32", 16, "layout", None, None, list(range(47))),
        ("no full page", "float32", 16, "layout", None, None, list(range(15))),
        ("salt", "bfloat16", 16, "layout", None, "pepper", list(range(32))),
        ("empty salt", "bfloat16", 16, "layout", None, "", list(range(32))),
        ("adapter", "bfloat16", 16, "layout", "pepper", None, list(range(32))),
        ("both", "bfloat16", 16, "layout", "größe", "salz", list(range(32))),
        ("largest ids", "float16", 2, "", None, None, [0, 2**32 - 1, 2**31, 1]),
    ]:
        fingerprint = blake3(name.encode()).digest()
        model = slow_model_root(fingerprint, dtype, page_tokens, layout)
        fields = [("adapter", adapter), ("salt", salt)]
        given_fields = [(field, text.encode()) for field, text in fields if text is not None]
        root = slow_root(("model_root", model), *given_fields) if given_fields else model
        cases.append(
            {
                "name": name,
                "fingerprint": fingerprint.hex(),
                "dtype": dtype,
                "page_tokens": page_tokens,
                "layout_id": layout,
                "adapter": adapter,
                "salt": salt,
                "tokens": tokens,
                "model_root": model.hex(),
                "root": root.hex(),
                "keys": [key.hex() for key in slow_keys(root, tokens, page_tokens)],
            }
        )
    text = json.dumps({"key_version": 1, "cases": cases}, indent=1, ensure_ascii=False)
    GOLDEN.write_text(text + "\n")


if __name__ == "__main__":
    write_golden()
