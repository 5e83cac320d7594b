"""A user's code while a file is read: by a deadline, one piece of a name at a time, and nothing is broken off."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pie.policies import user_code
from pie.policies.errors import PolicyError, PolicyFileError, PolicyLateError
from pie.policies.loader import load_policies
from pie.policies.user_code import UserCode

SLOW = """
import time
from pathlib import Path
from pie.policies.lru import LruRetention
here = Path(__file__).parent
with (here / "begun").open("a") as begun:
    begun.write("x")
while not (here / "go").exists():
    time.sleep(0.01)
class Slow(LruRetention): ...
"""
STUCK = """
import time
from pathlib import Path
from pie.policies.lru import LruRetention
class Stuck(LruRetention):
    def __init__(self, pages: int = 0) -> None:
        super().__init__()
        while pages and not (Path(__file__).parent / "go").exists():
            time.sleep(0.01)
"""
ONCE = """
import time
from pathlib import Path
from pie.policies.lru import LruRetention
class Once(LruRetention):
    made = 0
    def __init__(self, stubborn: bool = False) -> None:
        super().__init__()
        Once.made += 1
        while Once.made > 1 and not (Path(__file__).parent / "go").exists():
            try:
                time.sleep(0.01)
            except BaseException:
                if not stubborn:
                    raise
    def decide(self, view):
        return ()
"""
LONG_S = 60.0
"""Long enough for a busy machine; no test waits for it."""
TEXT = "worker: {retention: 'slow:Slow'}"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(user_code, "LIMIT_S", LONG_S)
    (tmp_path / "slow.py").write_text(SLOW)
    (tmp_path / "stuck.py").write_text(STUCK)
    (tmp_path / "once.py").write_text(ONCE)
    yield tmp_path
    (tmp_path / "go").touch()
    until(lambda: not user_code._running)


@contextlib.contextmanager
def hurried() -> Iterator[None]:
    """Wait for little: what is loaded does not come in time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(user_code, "LIMIT_S", 0.3)
        yield


def late(text: str, folder: Path, what: str) -> list[str]:
    """Return what is said once that is late, and not by chance something before it."""
    said: list[str] = []
    for _ in range(30):
        with hurried(), pytest.raises(PolicyLateError) as caught:
            load_policies(text, name="p", folder=folder)
        said = [str(one) for one in caught.value.problems]
        if what in said[0]:
            break
    return said


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_an_import_that_is_late_is_one_sentence_beside_all_else_that_is_wrong(folder: Path) -> None:
    with hurried(), pytest.raises(PolicyLateError) as caught:
        load_policies(f"{TEXT}\ncluster: {{routing: cosst}}", name="p", folder=folder)
    first, second = map(str, caught.value.problems)
    assert first == (
        "1:21: worker.retention: the import of module 'slow' has not come back in 0.3 s, and goes on by "
        "itself: try again once it is over, or let it do less"
    )
    assert "there is no routing policy 'cosst'" in second


def test_an_import_goes_on_once_and_is_there_for_the_next_file(folder: Path) -> None:
    for _ in range(3):
        with hurried(), pytest.raises(PolicyLateError):
            load_policies(TEXT, name="p", folder=folder)
    assert (folder / "begun").read_text() == "x"
    assert sum(one.name == "pie-user-code" for one in threading.enumerate()) == 1
    (folder / "go").touch()
    until(lambda: not user_code._running)
    assert load_policies(TEXT, name="p", folder=folder).retention.factory.__name__ == "Slow"
    assert (folder / "begun").read_text() == "x"


def test_a_module_that_has_changed_since_it_was_loaded_is_warned_of_once_a_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(folder)
    code = "from pie.policies.lru import LruRetention\nclass Mine(LruRetention): ...\n"
    names = ["beside_it", "on_path_only"]
    for name in names:
        (folder / f"{name}.py").write_text(code)
    for name, where in zip(names, (folder, None), strict=True):
        text = f"# one line more\nworker: {{retention: '{name}:Mine'}}"
        file = folder / f"{name}.py"
        for saved, warnings in ((code, 0), (f"{code}# new\n", 1), (code, 0)):
            file.write_text(saved)
            for _ in range(2):
                found = load_policies(text, name="p", folder=where).warnings
                assert len(found) == warnings
                assert all(
                    str(one).startswith(f"2:21: worker.retention: {name}.py has changed since")
                    for one in found
                )
        file.unlink()


def test_a_module_that_is_saved_anew_while_it_is_imported_has_changed(folder: Path) -> None:
    with hurried(), pytest.raises(PolicyLateError):
        load_policies(TEXT, name="p", folder=folder)
    until((folder / "begun").exists)
    (folder / "slow.py").write_text(f"{SLOW}# new\n")
    (folder / "go").touch()
    until(lambda: not user_code._running)
    assert len(load_policies(TEXT, name="p", folder=folder).warnings) == 1


def test_two_files_at_once_see_a_module_that_is_whole(folder: Path) -> None:
    found: list[str] = []

    def read() -> None:
        found.append(load_policies(TEXT, name="p", folder=folder).retention.factory.__name__)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    until((folder / "begun").exists)
    (folder / "go").touch()
    for thread in threads:
        thread.join(LONG_S)
    assert found == ["Slow", "Slow"]


def test_a_class_that_is_made_for_ever_is_one_sentence_too(folder: Path) -> None:
    # What is late below is not the import.
    load_policies("worker: {retention: 'stuck:Stuck'}", name="p", folder=folder)
    for _ in range(2):
        text = "worker: {retention: {policy: 'stuck:Stuck', pages: 1}}"
        assert late(text, folder, "a new") == [
            "1:30: worker.retention: a new Stuck has not come back in 0.3 s, and goes on by itself"
        ]
    assert sum(one.name == "pie-user-code" for one in threading.enumerate()) == 1
    policies = load_policies("worker: {retention: 'stuck:Stuck'}", name="p", folder=folder)
    assert policies.retention.name == "stuck:Stuck"


@pytest.mark.parametrize("hangs", ["__str__", "__getattribute__"])
def test_what_a_class_or_its_error_says_for_ever_is_one_sentence_too(
    hangs: str, folder: Path
) -> None:
    (folder / "says.py").write_text(
        "import time\n"
        "from pathlib import Path\n"
        "from pie.policies.lru import LruRetention\n"
        "def wait(*_):\n"
        "    while not (Path(__file__).parent / 'go').exists(): time.sleep(0.01)\n"
        "    return ''\n"
        "class SaysError(Exception): __str__ = wait\n"
        "class Raises(LruRetention):\n"
        "    def __init__(self): raise SaysError\n"
        "class Meta(type): __getattribute__ = wait\n"
        "class Looks(LruRetention, metaclass=Meta): ...\n"
        "class Fine(LruRetention): ...\n"
    )
    # What is late below is not the import.
    load_policies("worker: {retention: 'says:Fine'}", name="p", folder=folder)
    name, said = {
        "__str__": ("Raises", "a new Raises has not come back in 0.3 s"),
        "__getattribute__": ("Looks", "a look at 'says:Looks' has not come back in 0.3 s"),
    }[hangs]
    refused: list[str] = []

    def load() -> None:
        refused.extend(late(f"worker: {{retention: 'says:{name}'}}", folder, said))

    # Where it hangs, the test does not.
    thread = threading.Thread(target=load, daemon=True)
    thread.start()
    thread.join(LONG_S)
    assert refused == [f"1:21: worker.retention: {said}, and goes on by itself"]


def test_every_module_that_is_late_is_told(folder: Path) -> None:
    for number in range(3):
        (folder / f"slow{number}.py").write_text(SLOW)
    several = ", ".join(f"'slow{number}:Slow'" for number in range(3))
    with hurried(), pytest.raises(PolicyLateError) as caught:
        load_policies(f"cluster: {{migration: [{several}]}}", name="p", folder=folder)
    assert len(caught.value.problems) == 3


def test_what_no_thread_could_be_started_for_runs_the_next_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(RuntimeError, match="new thread"):
            UserCode(0.3).run("piece", lambda: 1)
    assert UserCode(LONG_S).run("piece", lambda: 2) == 2


def test_what_is_wrong_for_good_is_not_late(folder: Path) -> None:
    with pytest.raises(PolicyFileError) as caught:
        load_policies("worker: {retention: 'nowhere:X'}", name="p", folder=folder)
    assert not isinstance(caught.value, PolicyLateError)


def test_a_command_says_it_and_ends_though_the_import_goes_on(folder: Path) -> None:
    (folder / "for_ever.py").write_text("while True: pass\n")
    (folder / "p.yaml").write_text("worker: {retention: 'for_ever:X'}")
    code = (
        "from pie.policies import user_code; user_code.LIMIT_S = 0.3\n"
        "from pie.cluster.cli import app; app(['policy', 'check', 'p.yaml'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith(
        "pie: p.yaml:1:21: worker.retention: the import of module 'for_ever' has not come back in 0.3 s"
    )
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("stubborn", [False, True])
def test_a_class_that_can_be_made_once_is_waited_for_once_and_ended(
    folder: Path, stubborn: bool
) -> None:
    text = f"worker: {{retention: {{policy: 'once:Once', stubborn: {str(stubborn).lower()}}}}}"
    policies = load_policies(text, name="p", folder=folder)
    told = "a new once:Once cannot be made: it has not come back in 0.3 s"
    for _ in range(3):
        with hurried(), pytest.raises(PolicyError, match=told):
            policies.new_retention_aside()
        if stubborn:
            assert sum(one.name == "pie-user-code" for one in threading.enumerate()) == 1
        else:
            until(lambda: not user_code._running)
    (folder / "go").touch()
    until(lambda: not user_code._running)
    assert policies.new_retention_aside() is not policies.new_retention_aside()


def test_what_workers_move_by_themselves_is_known_without_making_a_users_policy(
    folder: Path,
) -> None:
    text = "cluster: {migration: ['once:Once', {policy: prefetch, requests: 9}]}"
    policies = load_policies(text, name="p", folder=folder)
    assert policies.worker_moves().looks_ahead == 9


def test_what_had_not_begun_when_it_was_given_up_never_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pieces: list[Any] = []
    began: list[None] = []
    monkeypatch.setattr(user_code._Piece, "start", lambda piece: pieces.append(piece))  # noqa: PLW0108 - it is bound
    with hurried(), pytest.raises(user_code.LateError):
        user_code.made("late", lambda: began.append(None))
    pieces[0]._run()
    assert not began
    assert "late" not in user_code._stuck
    assert not user_code._running
