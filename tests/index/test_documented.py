"""What `docs/index.md` says: its example finds pages, and its users may do what is needed and no more."""

import asyncio
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import redis

from pie.index.conformance import record
from pie.index.lookup import DirectLookup
from pie.index.policy_follower import PolicyFollower
from pie.index.policy_store import PolicyVersion
from pie.index.publisher import Publisher
from pie.index.scripts import ANNOUNCE, APPLY, FILL, WITHDRAW
from pie.index.settings import IndexSettings
from pie.page.events import PageEntry, Part, PlaceId, Tier, part_bit
from pie.page.key import model_root, page_keys, tenant_root
from tests.index.places import running
from tests.index.test_deployments import use_all, use_commons
from tests.support.redis_deployments import Servers, connect

PAGE = (Path(__file__).parents[2] / "docs" / "index.md").read_text()
pytestmark = pytest.mark.live


def _example() -> str:
    found = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None
    return found[1]


async def _ask(*arguments: str) -> dict[str, list[int]]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _example(), *arguments), stdout=asyncio.subprocess.PIPE
    )
    told, _ = await process.communicate()
    assert process.returncode == 0
    found: dict[str, list[int]] = json.loads(told)
    return found


@pytest.mark.parametrize("salt", ["", "a tenant's"])
async def test_the_example_finds_what_a_publisher_wrote(
    index_settings: IndexSettings, salt: str
) -> None:
    model = model_root(fingerprint=b"f", dtype="float32", page_tokens=16, layout_id="l")
    root = tenant_root(model, salt=salt) if salt else model
    tokens = [token * 7919 % 50_000 for token in range(16 * 600 + 5)]
    keys = page_keys(root, tokens, 16)
    entries = [
        PageEntry(key, root, at, Part.FULL, Tier.HOST if at < 3 else Tier.DEVICE, 64)
        for at, key in enumerate(keys)
    ]
    publishers = []
    for name, held in (("w0", entries), ("w1", entries[:400] + entries[401:]), ("w{2", [])):
        said = msgspec.structs.replace(record(name, ttl_s=60), model_root=model, page_tokens=16)
        place = Publisher(index_settings.url, said, held.copy, settings=index_settings)
        publishers.append(place)
        await place.start()
        assert await place.flushed(60)
    try:
        found = await _ask(
            index_settings.url, index_settings.key_prefix, "tiny", salt, json.dumps(tokens)
        )
        host, device = part_bit(Part.FULL, Tier.HOST), part_bit(Part.FULL, Tier.DEVICE)
        run = [host] * 3 + [device] * 597
        assert found == {"w0": run, "w1": run[:400], "w{2": []}
        publishers[0].removed(entries[10:11])
        assert await publishers[0].flushed(60)
        await publishers[2].close()
        found = await _ask(
            index_settings.url, index_settings.key_prefix, "tiny", salt, json.dumps(tokens)
        )
        assert found == {"w0": run[:10], "w1": run[:400]}
    finally:
        for place in publishers:
            await place.close()


def test_the_example_needs_nothing_of_pie() -> None:
    assert "pie." not in _example()


def _rules(line: int) -> list[str]:
    """Return the words behind the user's password that the page gives."""
    found = re.findall(r"~pie:\* -@all (.*?)[`\n]", PAGE)
    return ["resetkeys", "resetchannels", "~pie:*", "-@all", *found[line].split()]


def _allow(port: int, name: str, rules: list[str], password: str | None = None) -> None:
    with connect(port, password=password) as client:
        client.execute_command("ACL", "SETUSER", name, "on", ">secret", *rules)
        client.acl_log_reset()


def _refused(port: int, password: str | None = None) -> set[str]:
    with connect(port, password=password) as client:
        return {str(entry["object"]) for entry in client.acl_log(100)}


@pytest.fixture(scope="module")
def server() -> Iterator[int]:
    servers = Servers()
    try:
        yield servers.start(['save ""'])
    finally:
        servers.close()


async def _use_everything(settings: IndexSettings) -> None:
    async def take(_: int, version: PolicyVersion) -> str:
        return "" if version.text else "nothing"

    async with running(settings) as index:
        place = await index.join("w0", holding=20)
        await index.join("w1", holding=20)
        await index.settled()
        place.remove(*range(10, 20))
        await index.settled()
        await asyncio.to_thread(use_all, settings)
        follower = PolicyFollower(settings.url, "router-0", take, settings=settings)
        await follower.start()
        assert follower.state.version == 1
        await follower.close()
        await use_commons(settings)
        place.clear()
        await index.settled()


async def test_a_user_with_the_documented_commands_does_all_that_pie_does(server: int) -> None:
    await asyncio.to_thread(_allow, server, "pie", _rules(0))
    await _use_everything(
        IndexSettings(url=f"redis://pie:secret@127.0.0.1:{server}/0", ttl_s=1.0, poll_s=0.05)
    )
    assert await asyncio.to_thread(_refused, server) == set()


async def test_in_a_cluster_too(redis_cluster: Servers) -> None:
    found = re.search(r"In a Cluster also `(.*?)`", PAGE)
    assert found is not None
    for port in redis_cluster.processes:
        await asyncio.to_thread(
            _allow, port, "pie", [*_rules(0), *found[1].split()], password="open"
        )
    nodes = ",".join(f"127.0.0.1:{port}" for port in redis_cluster.processes)
    await _use_everything(
        IndexSettings(url=f"redis+cluster://pie:secret@{nodes}", ttl_s=1.0, poll_s=0.05)
    )
    for port in redis_cluster.processes:
        assert await asyncio.to_thread(_refused, port, password="open") == set()


_USED = {"ping", "select", "client|setinfo", "evalsha", "script|load", "eval", "scan", "hscan"}


def test_no_command_is_documented_that_nothing_uses() -> None:
    scripts = f"{FILL}{ANNOUNCE}{APPLY}{WITHDRAW}"
    sources = (Path(__file__).parents[2] / "index").glob("*.py")
    code = scripts + "".join(source.read_text() for source in sources)
    words = {rule.removeprefix("+") for rule in _rules(0) if rule.startswith("+")}
    unused = {
        word for word in words - _USED if not re.search(rf"'{word.upper()}'|\.{word}\(", code)
    }
    assert unused == set()


async def test_a_user_who_only_asks_can_change_nothing(server: int) -> None:
    await asyncio.to_thread(_allow, server, "asker", _rules(1))
    model = model_root(fingerprint=b"f", dtype="float32", page_tokens=4, layout_id="l")
    keys = page_keys(model, range(8), 4)
    entries = [PageEntry(key, model, at, Part.FULL, Tier.DEVICE, 64) for at, key in enumerate(keys)]
    settings = IndexSettings(url=f"redis://127.0.0.1:{server}/1")
    said = msgspec.structs.replace(record("w0", ttl_s=60), model_root=model, page_tokens=4)
    place = Publisher(settings.url, said, lambda: entries, settings=settings)
    await place.start()
    assert await place.flushed(60)
    url = f"redis://asker:secret@127.0.0.1:{server}/1"
    assert await _ask(url, "pie", "tiny", "", json.dumps(list(range(8)))) == {"w0": [1, 1]}
    assert await asyncio.to_thread(_refused, server) == set()
    lookup = DirectLookup(url, settings=settings)
    assert set(await asyncio.to_thread(lookup.matches, keys)) == {PlaceId("w0")}
    lookup.close()
    client = redis.Redis.from_url(url, protocol=2)
    with pytest.raises(redis.exceptions.NoPermissionError):
        await asyncio.to_thread(client.srem, "pie:places", "w0")
    with pytest.raises(redis.exceptions.NoPermissionError):
        await asyncio.to_thread(client.get, "other")
    client.close()
    await place.close()
