"""Keys of a prompt are the same however they are made, and a long one's let others have their turn."""

import asyncio
from array import array

import pytest

from pie.page.key import RootKey, page_keys, tenant_root
from pie.router import prefix as prefix_module
from pie.router.prefix import Prefix

ROOT, OTHER = RootKey(bytes(32)), RootKey(bytes([1]) * 32)


@pytest.mark.parametrize("tokens", [0, 7, 8, 63, 64, 65, 200])
@pytest.mark.parametrize("known", [0, 5, 8, 64, 70])
async def test_prepared_keys_are_those_that_are_made_in_one_go(
    monkeypatch: pytest.MonkeyPatch, tokens: int, known: int
) -> None:
    monkeypatch.setattr(prefix_module, "_LONG_TOKENS", 10)
    monkeypatch.setattr(prefix_module, "_AT_ONCE_PAGES", 3)
    ids = array("I", range(known + tokens))
    prefix = Prefix(ids[:known], "salt").longer(ids[known:])
    assert await prefix.prepare([(ROOT, 4), (OTHER, 8)]) is (len(ids) > 10)
    # Once is enough.
    assert not await prefix.prepare([(ROOT, 4), (OTHER, 8)])
    for root, page_tokens in ((ROOT, 4), (OTHER, 8)):
        whole = page_keys(tenant_root(root, salt="salt"), ids, page_tokens)
        assert list(prefix.keys(root, page_tokens)) == whole


async def test_others_have_turns_while_a_long_prompts_keys_are_made() -> None:
    prefix = Prefix(array("I", range(100_000)))
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    assert await prefix.prepare([(ROOT, 16)])
    task.cancel()
    assert turns >= 6
