"""A watched policy file: however it is edited, what it says is handed on once."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from pie.cluster.config import load_config
from pie.cluster.errors import ConfigError, NotRunningError
from pie.cluster.policy_watch import PolicyWatch, ServedPolicies
from pie.index.policy_store import PolicyStore
from pie.index.settings import IndexSettings
from pie.policies import user_code
from tests.support.redis_server import index_settings, redis_server, redis_url

__all__ = ["index_settings", "redis_server", "redis_url"]

LRU, LFU, ARC = (f"worker: {{retention: {name}}}" for name in ("lru", "lfu", "arc"))
BAD = "worker: {retention: lruu}\ncluster: 3"


class Taker:
    """Writes down what it is handed."""

    def __init__(self, file: Path) -> None:
        self.taken: list[str] = []
        self.refused: list[Sequence[str]] = []
        self.said: list[str] = []
        self.is_away = False
        self.error: Exception | None = None
        self.watch = PolicyWatch(
            file,
            take=self.take,
            refuse=self.refuse,
            restored=lambda: self.said.append("restored"),
            say=self.said.append,
            away=NotRunningError,
        )

    def take(self, text: str) -> None:
        if self.is_away:
            raise NotRunningError("nobody is there")
        if self.error is not None:
            raise self.error
        self.taken.append(text)

    def refuse(self, problems: Sequence[str]) -> None:
        if self.is_away:
            raise NotRunningError("nobody is there")
        self.refused.append(problems)

    def look(self) -> None:
        for _ in range(2):
            self.watch.look()


def test_each_edit_is_handed_on_once_however_it_is_made(tmp_path: Path) -> None:
    file = tmp_path / "policies.yaml"
    (tmp_path / "..first").mkdir()
    (tmp_path / "..first" / "policies.yaml").write_text(LRU)
    (tmp_path / "..data").symlink_to("..first")
    file.symlink_to("..data/policies.yaml")
    taker = Taker(file)
    taker.look()
    (tmp_path / "..second").mkdir()
    (tmp_path / "..second" / "policies.yaml").write_text(LFU)
    (tmp_path / "..turned").symlink_to("..second")
    (tmp_path / "..turned").rename(tmp_path / "..data")
    taker.look()
    (tmp_path / "..second" / "policies.yaml").write_text(ARC)
    taker.look()
    (tmp_path / "other.yaml").write_text(LRU)
    (tmp_path / "other.yaml").rename(file)
    taker.look()
    assert taker.taken == [LRU, LFU, ARC, LRU]
    assert not taker.refused + taker.said


def test_all_that_is_wrong_is_told_once_and_a_good_file_is_taken_after_it(tmp_path: Path) -> None:
    file = tmp_path / "policies.yaml"
    file.write_text(BAD)
    taker = Taker(file)
    taker.look()
    assert [len(one) for one in taker.refused] == [2]
    assert taker.refused[0][0].startswith(f"{file}:1:21: worker.retention: there is no")
    file.write_text(LRU)
    taker.look()
    assert taker.taken == [LRU]


@pytest.mark.parametrize("text", ["", "a: &a [1]\nb: *a", "x" * (2 << 20), "\x00"])
def test_what_is_no_policy_file_is_never_an_error_of_the_watch(tmp_path: Path, text: str) -> None:
    file = tmp_path / "policies.yaml"
    file.write_text(text)
    taker = Taker(file)
    taker.look()
    assert len(taker.taken) + len(taker.refused) == 1


def test_a_file_that_is_gone_is_refused_once_and_restored_when_the_same_is_back(
    tmp_path: Path,
) -> None:
    file = tmp_path / "policies.yaml"
    gone = [f"{file}: cannot be read: No such file or directory"]
    taker = Taker(file)
    taker.look()
    assert taker.refused == [gone]
    file.write_text(LRU)
    taker.look()
    file.unlink()
    taker.is_away = True
    taker.look()
    assert taker.refused == [gone]
    taker.is_away = False
    taker.look()
    assert taker.refused == [gone, gone]
    file.write_text(LRU)
    taker.look()
    assert taker.said == ["nobody is there", "restored"]
    assert taker.taken == [LRU], "what was put in force by hand meanwhile stays"


def test_a_bad_file_that_was_gone_is_refused_again_when_it_is_back(tmp_path: Path) -> None:
    file = tmp_path / "policies.yaml"
    file.write_text(BAD)
    taker = Taker(file)
    taker.look()
    file.unlink()
    taker.look()
    file.write_text(BAD)
    taker.look()
    assert [len(one) for one in taker.refused] == [2, 1, 2]
    assert not taker.said


def test_a_pipe_in_the_files_place_is_not_waited_for(tmp_path: Path) -> None:
    file = tmp_path / "policies.yaml"
    os.mkfifo(file)
    taker = Taker(file)
    taker.look()
    assert taker.refused == [[f"{file}: cannot be read: it is a pipe"]]
    file.unlink()
    file.write_text(LRU)
    taker.look()
    assert taker.taken == [LRU]


def test_an_edit_is_offered_again_until_somebody_takes_it(tmp_path: Path) -> None:
    file = tmp_path / "policies.yaml"
    file.write_text(LRU)
    taker = Taker(file)
    taker.is_away = True
    taker.look()
    assert taker.said == ["nobody is there"]
    taker.is_away = False
    taker.look()
    assert taker.taken == [LRU]


def test_a_file_whose_module_is_imported_for_long_is_refused_once_and_taken_when_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_code, "LIMIT_S", 0.2)
    (tmp_path / "watched_long.py").write_text(
        "import time\nfrom pathlib import Path\nfrom pie.policies.lru import LruRetention\n"
        "while not Path(__file__).with_name('go').exists(): time.sleep(0.01)\n"
        "class Long(LruRetention): ...\n"
    )
    file = tmp_path / "policies.yaml"
    file.write_text("worker: {retention: 'watched_long:Long'}")
    taker = Taker(file)
    taker.look()
    (told,) = taker.refused
    assert "the import of module 'watched_long' has not come back in 0.2 s" in told[0]
    assert not taker.taken
    (tmp_path / "go").touch()
    monkeypatch.setattr(user_code, "LIMIT_S", 60.0)
    taker.look()
    assert taker.taken == ["worker: {retention: 'watched_long:Long'}"]
    assert len(taker.refused) == 1


def test_whatever_goes_wrong_with_an_edit_is_refused_once_and_tried_again(tmp_path: Path) -> None:
    file = tmp_path / "policies.yaml"
    file.write_text(LRU)
    taker = Taker(file)
    taker.error = RuntimeError("can't start new thread")
    taker.look()
    (told,) = taker.refused
    assert told[0].startswith(f"{file}: cannot be taken: RuntimeError: can't start new thread (")
    taker.error = None
    taker.look()
    assert (taker.taken, len(taker.refused)) == ([LRU], 1)


def test_watching_needs_a_file_to_watch(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="watch needs file: the policy file to watch"):
        load_config(None, {"PIE_POLICIES__WATCH": "true"})


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


@pytest.mark.live
def test_what_pie_serve_watches_is_in_force_and_a_bad_edit_is_kept_for_status(
    tmp_path: Path, index_settings: IndexSettings
) -> None:
    file = tmp_path / "policies.yaml"
    file.write_text(LRU)
    said: list[str] = []
    served = ServedPolicies(file, LRU, index_settings.url, index_settings, said.append)
    store = PolicyStore(index_settings.url, index_settings)
    served.start()
    try:
        file.write_text(LFU)
        until(lambda: store.current() == 1)
        applied = store.version(1)
        assert applied is not None
        assert applied.text == LFU
        file.write_text(BAD)
        until(lambda: store.refused() is not None)
        refused = store.refused()
        assert refused is not None
        assert len(refused.problems) == 2
        file.write_text(LFU)
        until(lambda: store.refused() is None)
        assert store.current() == 1, "it is what is in force"
        file.unlink()
        until(lambda: store.refused() is not None)
        assert "cannot be read: No such file or directory" in str(store.refused())
        file.write_text(LFU)
        until(lambda: store.refused() is None)
        assert store.current() == 1
        file.write_text(BAD)
        until(lambda: store.refused() is not None)
        store.apply(ARC, "by hand")
        assert store.refused() is None
        file.write_text(LRU)
        until(lambda: store.current() == 3)
    finally:
        served.close()
        store.close()
    assert said[0] == f"version 1 is in force, from {file}"


@pytest.mark.live
def test_what_is_not_watched_is_told_where_another_version_is_in_force(
    tmp_path: Path, index_settings: IndexSettings
) -> None:
    file = tmp_path / "policies.yaml"
    said: list[str] = []
    served = ServedPolicies(file, LRU, index_settings.url, index_settings, said.append)
    store = PolicyStore(index_settings.url, index_settings)
    for text in (LRU, None):
        served.tell()
        store.apply(text, "as the file")
    served.tell()
    assert not said
    store.apply(ARC, "another")
    served.tell()
    store.close()
    (told,) = said
    assert told.startswith(
        "version 3 is in force; policies.yaml differs from it (`pie policy apply"
    )
