"""A worker's policies change whole or not at all."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from pie.index.policy_store import PolicyVersion
from pie.page.events import Part
from pie.page.key import PageKey, RootKey, page_keys, tenant_root
from pie.policies import user_code
from pie.policies.errors import PolicyError, PolicyLateError
from pie.policies.lru import LruRetention
from pie.policies.policy_set import PolicySet
from pie.policies.retention import PageView
from pie.policies.versions import PolicyVersions
from pie.tokens.tokenizer import Tokenizer
from pie.worker.engine_thread import EngineThread
from pie.worker.page_table import FrozenPage
from pie.worker.policy_change import PolicyChange
from tests.worker.engine.driver import Driver
from tests.worker.engine.test_generation import Scripted
from tests.worker.engine.test_page_table import hold, make_table

MODULE = """
from pie.policies.lru import LruRetention

class Fails(LruRetention):
    made = 0

    def __init__(self):
        super().__init__()
        Fails.made += 1
        if Fails.made == 2:
            raise RuntimeError("no second one")
"""


@pytest.fixture
def thread(tokenizer: Tokenizer) -> Iterator[EngineThread]:
    """The thread of an engine that has nothing to run."""
    died: list[BaseException] = []
    driver = Driver(Scripted([]), tokenizer, pages=4, page_tokens=4)
    thread = EngineThread(driver.engine, lambda _: None, died.append)
    thread.start()
    yield thread
    assert thread.stop(60)
    assert not died


async def test_a_version_that_fails_at_the_second_table_leaves_none_changed(
    thread: EngineThread, tmp_path: Path
) -> None:
    (tmp_path / "fails_at_second.py").write_text(MODULE)
    tables = [make_table(), make_table()]
    for table in tables:
        hold(table, 1, 2, 3)
    change = PolicyChange(
        PolicyVersions(PolicySet(folder=tmp_path)), thread, tables, None, lambda _: None
    )
    assert await change.take(1, PolicyVersion("worker: {retention: arc}", 0.0)) == ""
    assert [table.retention.policy_name for table in tables] == ["ArcRetention"] * 2
    with pytest.raises(PolicyError, match="no second one"):
        await change.take(2, PolicyVersion("worker: {retention: 'fails_at_second:Fails'}", 0.0))
    assert [table.retention.policy_name for table in tables] == ["ArcRetention"] * 2
    assert await change.take(3, PolicyVersion("worker: {retention: lru}", 0.0)) == ""
    for table in tables:
        assert table.retention.policy_name == "LruRetention"
        assert len(table.retention) == 3
        table.check()


async def test_a_class_whose_second_making_hangs_holds_up_no_event_loop(
    thread: EngineThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_code, "LIMIT_S", 0.3)
    hangs = MODULE.replace("raise RuntimeError", "while True: str").replace("Fails", "Hangs")
    (tmp_path / "hangs_at_second.py").write_text(hangs)
    table = make_table()
    versions = PolicyVersions(PolicySet(folder=tmp_path))
    change = PolicyChange(versions, thread, [table], None, lambda _: None)
    text = "worker: {retention: 'hangs_at_second:Hangs'}"
    taking = asyncio.ensure_future(change.take(1, PolicyVersion(text, 0.0)))
    turns = 0
    while not taking.done():
        await asyncio.sleep(0.01)
        turns += 1
    with pytest.raises(PolicyError, match=r"Hangs cannot be made: it has not come back in 0\.3 s"):
        taking.result()
    assert turns > 1
    assert table.retention.policy_name == "LruRetention"


async def test_a_table_whose_pages_are_not_handed_over_keeps_its_policy(
    thread: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = make_table()
    hold(table, 1, 2, 3)
    change = PolicyChange(PolicyVersions(PolicySet()), thread, [table], None, lambda _: None)
    moves = table.retention.move_over

    def fail_at_once(*_: object) -> None:
        monkeypatch.setattr(table.retention, "move_over", moves)
        raise RuntimeError("in the middle")

    monkeypatch.setattr(table.retention, "move_over", fail_at_once)
    with pytest.raises(RuntimeError, match="in the middle"):
        await change.take(1, PolicyVersion("worker: {retention: arc}", 0.0))
    assert table.retention.policy_name == "LruRetention"
    assert not table.retention.next_sees_pages
    assert await change.take(2, PolicyVersion("worker: {retention: arc}", 0.0)) == ""
    assert table.retention.policy_name == "ArcRetention"
    table.check()


async def test_a_module_that_is_imported_for_long_changes_nothing_and_may_be_there_later(
    thread: EngineThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_code, "LIMIT_S", 0.3)
    (tmp_path / "takes_long.py").write_text(
        "import time\nfrom pathlib import Path\nfrom pie.policies.arc import ArcRetention\n"
        "while not Path(__file__).with_name('go').exists(): time.sleep(0.01)\n"
        "class Long(ArcRetention): ...\n"
    )
    table = make_table()
    versions = PolicyVersions(PolicySet(folder=tmp_path))
    change = PolicyChange(versions, thread, [table], None, lambda _: None)
    version = PolicyVersion("worker: {retention: 'takes_long:Long'}", 0.0)
    with pytest.raises(PolicyLateError, match="has not come back in"):
        await change.take(1, version)
    assert table.retention.policy_name == "LruRetention"
    assert versions.current is versions.own
    (tmp_path / "go").touch()
    monkeypatch.setattr(user_code, "LIMIT_S", 60.0)
    assert await change.take(1, version) == ""
    assert table.retention.policy_name == "Long"


async def test_a_prefix_that_is_named_later_is_every_tenants_that_is_there(
    thread: EngineThread,
) -> None:
    root = RootKey(bytes(32))
    table = dataclasses.replace(make_table(total=16), model_root=root)
    wanted: set[PageKey] = set()
    for salt in (None, "one", "two"):
        before: bytes = tenant_root(root, salt=salt)
        keys = page_keys(RootKey(before), range(6), 2)
        pages = table.allocate(len(keys), 0)
        assert pages is not None
        held = []
        for at, (page, key) in enumerate(zip(pages, keys, strict=True)):
            held.append(table.freeze(page, FrozenPage(key, before, at), 0))
            before = key
        # The last page was used first, so it is handed over first.
        for page in reversed(held):
            table.release([page])
        for key in reversed(keys):
            table.retention.hit(key, Part.FULL, 0.0)
        wanted |= set(keys[:2])

    def resolve(policies: PolicySet) -> None:
        policies.prefixes.resolve(root, 2, lambda _: range(4))

    change = PolicyChange(PolicyVersions(PolicySet()), thread, [table], None, resolve)
    text = "{prefixes: {desk: {text: Ahoy}}, worker: {rules: [{match: {prefix: desk}, action: persist-prefix}]}}"
    assert await change.take(1, PolicyVersion(text, 0.0)) == ""
    assert {key for key, _ in table.retention.persistent()} == wanted
    table.check()


class Failing:
    """A user's policy that raises whenever it is asked, after it has proposed what is not there."""

    def stored(self, page: PageView, now_s: float) -> None: ...

    def hit(self, key: PageKey, part: Part, now_s: float) -> None: ...

    def removed(self, key: PageKey, part: Part) -> None: ...

    def victims(self, bytes_needed: int, now_s: float) -> Iterable[tuple[PageKey, Part]]:
        yield PageKey(bytes(32)), Part.FULL
        raise ValueError("no")


def test_failures_of_a_policy_are_among_a_workers_figures(tokenizer: Tokenizer) -> None:
    engine = Driver(Scripted([]), tokenizer, pages=4, page_tokens=4).engine
    table = engine.tables[0]
    pages = table.allocate(1, 0.0)
    assert pages is not None
    table.release([table.freeze(pages[0], FrozenPage(PageKey(b"k" * 32), b"", 0), 0.0)])
    table.begin_replace(Failing()).put_in_order()
    while not table.move_over(9, 0.0):
        pass
    table.retention.victims(1, 0.0)
    table.retention.victims(1, 0.0)
    engine.step()
    status = engine.status
    assert (status.policy_failures, status.policy_fallbacks) == (2, 2)
    assert status.policy_proposals_refused == {"pinned": 0, "unknown": 2}
    assert status.policy_failing == {"failures": 2, "fallbacks": 2, "unknown": 2}
    # Another policy has not failed; what was counted stays.
    table.begin_replace(LruRetention()).put_in_order()
    while not table.move_over(9, 0.0):
        pass
    engine.step()
    assert engine.status.policy_failures == 2
    assert not any(engine.status.policy_failing.values())
