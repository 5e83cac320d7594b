"""`/admin/policies`: policies looked at and applied through a router."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from pie.cluster.errors import NotRunningError, UncertainError
from pie.cluster.policy_edit import Desk
from pie.index.policy_store import PolicyKeys, PolicyStore
from pie.index.server import EmbeddedServer
from pie.index.settings import IndexSettings
from pie.policies import user_code
from pie.policies.loader import load_policy_file
from pie.policies.policy_set import PolicySet
from pie.policies.routing_plain import RoundRobinRouting
from pie.router.key_file import KeyFile, write_key_file
from tests.policies.bad_files import BAD_FILES, write_modules
from tests.router.conftest import WAIT_S, Cluster, until
from tests.support.redis_server import own_redis_server

__all__ = ["own_redis_server"]

GOOD = "cluster: {routing: round-robin}"


async def test_a_version_is_applied_and_the_router_runs_it(
    cluster: Cluster, tmp_path: Path
) -> None:
    router = await cluster.router(0)
    async with httpx.AsyncClient(base_url=router.url) as client:
        before = (await client.get("/admin/policies")).json()
        assert (before["version"], before["versions"]) == (0, [])
        applied = await client.post("/admin/policies", json={"text": GOOD, "note": "a test"})
        assert applied.json() == {"version": 1, "warnings": []}
        async with asyncio.timeout(WAIT_S):
            while True:
                report = (await client.get("/admin/policies")).json()
                if [one["version"] for one in report["places"]] == [1]:
                    break
                await asyncio.sleep(0.05)
        status = (await client.get("/status")).json()
        assert status["policy_version"] == 1
        assert status["policy_file_differs"] == ""
        file = tmp_path / "own.yaml"
        file.write_text("worker: {retention: lfu}")
        router._policies.own = load_policy_file(file)
        told = (await client.get("/status")).json()["policy_file_differs"]
        assert told.startswith("version 1 is in force; own.yaml differs from it (`pie policy apply")
        assert (await client.get("/admin/policies")).json()["file_differs"] == told
        file.write_text(GOOD)
        assert (await client.get("/status")).json()["policy_file_differs"] == ""
        router._policies.own = PolicySet()
        listed = [(one["version"], one["text_bytes"], one["note"]) for one in report["versions"]]
        assert listed == [(1, len(GOOD), "a test")]
        for version, text in ((0, None), (1, GOOD)):
            answer = await client.get(f"/admin/policies/versions/{version}")
            assert answer.json() == {"version": version, "text": text}
        for unknown in ("2", "-1", "x", "9" * 40):
            assert (await client.get(f"/admin/policies/versions/{unknown}")).status_code == 404
    assert isinstance(router._chooser._policy, RoundRobinRouting)


async def test_a_rule_for_a_tenant_that_is_not_there_is_warned_of(
    cluster: Cluster, tmp_path: Path
) -> None:
    file = tmp_path / "keys.json"
    write_key_file(file, KeyFile().with_tenant("acme"))
    cluster.mock("w0")
    router = await cluster.router(1, keys_file=file, api_token="t")
    tags = router._tenant_tags()
    assert tags is not None
    (tag,) = tags
    text = (
        "worker:\n  rules:\n"
        f"    - {{match: {{tenant: {tag}}}, action: pin}}\n"
        f"    - {{match: {{tenant: '{tag[:4]}*'}}, action: ttl, after: 1d}}\n"
        "    - {match: {tenant: '0123456789abcdef'}, action: pin}\n"
        "    - {match: {tenant: acme}, action: pin}\n"
    )
    headers = {"authorization": "Bearer t"}
    async with httpx.AsyncClient(base_url=router.url, headers=headers) as client:
        checked = await client.post("/admin/policies", json={"text": text, "check": True})
        assert checked.json()["version"] == 0
        first, second = checked.json()["warnings"]
        assert first.startswith("6:16: worker.rules[3].match.tenant: no page is meant")
        assert second.startswith(
            "5:16: worker.rules[2].match.tenant: no known tenant has a tag like"
        )
        applied = await client.post("/admin/policies", json={"text": text})
        assert applied.json() == {"version": 1, "warnings": checked.json()["warnings"]}


async def test_what_is_not_acceptable_is_told_and_changes_nothing(cluster: Cluster) -> None:
    router = await cluster.router(0)
    async with httpx.AsyncClient(base_url=router.url) as client:
        for body, said in (
            ({"text": "worker: {retention: lruu}\ncluster: 3"}, "lruu"),
            ({"text": 7}, "body:"),
            ({}, "body:"),
            ({"text": GOOD, "more": 1}, "body:"),
        ):
            answer = await client.post("/admin/policies", json=body)
            assert answer.status_code == 400
            assert said in answer.json()["error"]["message"]
        for cut, said in (
            (
                b'{"text": "\\ud800"}',
                "body: a text in it is not valid Unicode: half of a surrogate",
            ),
            (b'{"text": "\\ud800', "body: Input data was truncated"),
        ):
            headers = {"content-type": "application/json"}
            answer = await client.post("/admin/policies", content=cut, headers=headers)
            assert answer.status_code == 400
            assert answer.json()["error"]["message"].startswith(said)
        answer = await client.post("/admin/policies", content=b'{"text": null}')
        assert answer.status_code == 415
        assert (await client.get("/admin/policies")).json()["version"] == 0


async def test_every_bad_text_is_told_by_a_live_router_and_nothing_changes(
    cluster: Cluster, tmp_path: Path
) -> None:
    write_modules(tmp_path)
    router = await cluster.router(0)
    router._policies.own = replace(router._policies.own, folder=tmp_path)
    async with httpx.AsyncClient(base_url=router.url, timeout=60) as client:
        for bad in BAD_FILES:
            if isinstance(bad.text, bytes):
                # JSON is UTF-8, so that it does not get as far as being a policy file.
                headers = {"content-type": "application/json"}
                content = b'{"text": "' + bad.text + b'"}'
                answer = await client.post("/admin/policies", content=content, headers=headers)
                assert answer.status_code == 400, bad.name
                continue
            answer = await client.post("/admin/policies", json={"text": bad.text})
            assert answer.status_code == 400, bad.name
            told = answer.json()["error"]["message"].splitlines()
            assert len(told) == len(bad.said), bad.name
            for line, said in zip(told, bad.said, strict=True):
                assert said in line
        large = await client.post("/admin/policies", json={"text": "#" * 10_000_000})
        assert large.status_code in (400, 413)
        report = (await client.get("/admin/policies")).json()
        assert (report["version"], report["versions"]) == (0, [])
    assert router._policies.current == PolicySet()


async def test_what_others_wrote_is_left_out_and_a_bad_count_is_a_sentence(
    cluster: Cluster,
) -> None:
    router = await cluster.router(0)
    keys = PolicyKeys(cluster.index.key_prefix)
    async with httpx.AsyncClient(base_url=router.url) as client:
        body = {"text": GOOD, "note": "n" * 100_000}
        assert (await client.post("/admin/policies", json=body)).status_code == 200
        with redis.Redis.from_url(cluster.index.url) as server:
            server.hset(keys.versions, "x", "{")
            server.hset(keys.places, "gone", "x")
            server.xadd(keys.events, {"event": "{"})
            report = (await client.get("/admin/policies")).json()
            assert [len(one["note"]) for one in report["versions"]] == [200]
            assert (await client.get("/admin/policies/events")).json() == {"events": []}
            server.set(keys.count, "x")
        told = await client.get("/admin/policies")
        applied = await client.post("/admin/policies", json={"text": GOOD})
        for answer in (told, applied):
            assert answer.status_code == 503
            assert "no version's number" in answer.json()["error"]["message"]


async def test_a_module_that_is_imported_for_long_holds_up_nobody_and_changes_nothing(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_code, "LIMIT_S", 0.5)
    (tmp_path / "imported_long.py").write_text(
        "import time\nfrom pathlib import Path\nhere = Path(__file__)\n"
        "here.with_name('begun').touch()\n"
        "while not here.with_name('go').exists(): time.sleep(0.01)\n"
        "class Long:\n    def choose(self, request, workers): ...\n"
    )
    router = await cluster.router(0)
    router._policies.own = replace(router._policies.own, folder=tmp_path)
    body = {"text": "worker: {retention: lruu}\ncluster: {routing: 'imported_long:Long'}"}
    async with httpx.AsyncClient(base_url=router.url) as client:
        try:
            applied = asyncio.create_task(client.post("/admin/policies", json=body))
            await until((tmp_path / "begun").exists)
            assert (await client.get("/status")).status_code == 200
            answer = await applied
            assert answer.status_code == 400
            first, second = answer.json()["error"]["message"].splitlines()
            assert "there is no retention policy 'lruu'" in first
            assert "the import of module 'imported_long' has not come back in 0.5 s" in second
            assert (await client.get("/admin/policies")).json()["version"] == 0
        finally:
            (tmp_path / "go").touch()
        monkeypatch.setattr(user_code, "LIMIT_S", 60.0)
        body = {"text": "cluster: {routing: 'imported_long:Long'}"}
        assert (await client.post("/admin/policies", json=body)).json()["version"] == 1


async def test_while_redis_stands_still_a_version_is_applied_or_not_and_a_sentence_says_what_is_known(
    tmp_path: Path,
    chat_folder: Path,
    own_redis_server: EmbeddedServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = own_redis_server
    index = IndexSettings(url=server.url, key_prefix="p", request_timeout_s=0.5, poll_s=0.05)
    cluster = Cluster(tmp_path, chat_folder, index)
    current = PolicyStore.current

    def stand_still(*_: Any) -> None:
        assert server.pid is not None
        os.kill(server.pid, signal.SIGSTOP)

    def asked_at_last(store: PolicyStore) -> int:
        number = current(store)
        stand_still()
        return number

    try:
        desk = Desk((await cluster.router(0)).url, "")
        for at, known in enumerate((True, False)):
            if known:
                stand_still()
            else:
                monkeypatch.setattr(PolicyStore, "current", asked_at_last)
            with pytest.raises(NotRunningError, match="The index does not answer") as refused:
                await asyncio.to_thread(desk.apply, GOOD, "a test")
            assert str(refused.value).count("is not known") == (not known)
            assert isinstance(refused.value, UncertainError) is not known
            assert "\n" not in str(refused.value)
            monkeypatch.setattr(PolicyStore, "current", current)
            assert server.pid is not None
            os.kill(server.pid, signal.SIGCONT)
            # What Redis was told before it stood still, it does afterwards.
            async with asyncio.timeout(WAIT_S):
                while not await asyncio.to_thread(answers, desk):  # noqa: ASYNC110 - Redis tells nobody
                    await asyncio.sleep(0.05)
            assert len((await asyncio.to_thread(desk.report)).versions) == at
    finally:
        if server.pid is not None:
            os.kill(server.pid, signal.SIGCONT)
        await cluster.close()


def answers(desk: Desk) -> bool:
    """Return whether a router has an answer from Redis."""
    try:
        desk.report()
    except NotRunningError:
        return False
    return True
