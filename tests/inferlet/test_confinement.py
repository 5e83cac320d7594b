"""What a confined process cannot do, call by call, and what it still can."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from pie.inferlet.system_calls import FCNTL, IOCTL, PRCTL, numbers_of, seccomp_filter
from pie.worker.programs.process import program_environment

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Confined:
    held: set[str]
    refused: dict[str, str]
    """By the name of a system call: its error."""
    kept: list[str]
    told: dict[str, bool]
    folder: Path


@pytest.fixture(scope="module")
def confined(tmp_path_factory: pytest.TempPathFactory) -> Confined:
    """What one confined process found."""
    folder = tmp_path_factory.mktemp("theirs")
    (folder / "there").write_text("secret")
    (folder / "there").chmod(0o600)
    environment = program_environment()
    environment["PYTHONPATH"] += os.pathsep + str(ROOT)
    done = subprocess.run(
        [sys.executable, "-P", "-m", "tests.inferlet.confined_process", str(folder)],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    found = json.loads(done.stdout)
    if not {"landlock", "seccomp"} <= set(found["held"]):
        pytest.skip("this kernel confines nobody by Landlock and seccomp")
    return Confined(set(found["held"]), found["refused"], found["kept"], found["told"], folder)


def test_each_call_that_is_named_is_refused(confined: Confined) -> None:
    expected = dict.fromkeys(confined.refused, "EPERM") | {"clone3": "ENOSYS", "openat2": "ENOSYS"}
    assert confined.refused == expected
    assert set(numbers_of(platform.machine())) - set(confined.refused) <= {"open", "openat"}


def test_calls_that_a_program_may_make_do_it_no_harm_to_others(confined: Confined) -> None:
    assert [what for what in confined.kept if confined.told[what]] == []
    assert (confined.folder / "there").read_text() == "secret"
    assert (confined.folder / "there").stat().st_mode & 0o777 == 0o600
    assert list(confined.folder.iterdir()) == [confined.folder / "there"]


def test_what_python_needs_goes_on_working(confined: Confined) -> None:
    assert {what: went for what, went in confined.told.items() if what not in confined.kept} == (
        dict.fromkeys(
            (
                "threads with names",
                "a pair of streams",
                "an event loop",
                "a thread of the loop",
                "reading Python's files",
                "randomness",
                "signals to itself",
            ),
            True,
        )
    )


def test_both_machines_name_the_same_calls_by_numbers_of_their_own() -> None:
    intel, arm = numbers_of("x86_64"), numbers_of("aarch64")
    assert arm.keys() < intel.keys()
    for numbers in (intel, arm):
        assert len(set(numbers.values())) == len(numbers)
    # What arm64 never had; it has the calls that took their place.
    assert intel.keys() - arm.keys() == {
        *(
            "fork",
            "vfork",
            "creat",
            "mkdir",
            "mknod",
            "link",
            "symlink",
            "rename",
            "rmdir",
            "unlink",
        ),
        *("chmod", "chown", "lchown", "utime", "utimes", "futimesat", "inotify_init", "open"),
    }
    assert numbers_of("riscv64") == {}
    assert seccomp_filter("riscv64", 1) is None


def test_a_list_of_what_is_allowed_has_no_way_to_others() -> None:
    assert not {1, 4, 36, 62} & set(PRCTL)
    assert not {8, 10, 15, 1024, 1026} & set(FCNTL)
    assert not {0x8901, 0x8902, 0x5412} & set(IOCTL)


def test_the_folder_in_which_a_cluster_was_started_is_not_on_a_programs_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # There is a folder of that name, and a library that is found elsewhere.
    (tmp_path / "pie").mkdir()
    (tmp_path / "numpy").mkdir()
    (tmp_path / "numpy" / "__init__.py").write_text("")
    before = program_environment()
    monkeypatch.setattr(sys, "path", ["", *sys.path, str(tmp_path)])
    assert program_environment() == before
    folders = before["PYTHONPATH"].split(os.pathsep)
    assert not {"", str(Path.cwd()), str(tmp_path)} & set(folders)


def test_a_process_with_a_second_thread_is_not_confined_and_says_so() -> None:
    # One of a library, such as of Arrow's memory, would go on without limits beside the program.
    code = (
        "import threading, time\n"
        "from pie.inferlet.confine import ProcessLimits, confine\n"
        "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
        "confine(ProcessLimits(1 << 30, 30, 64))\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env=program_environment(),
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert b"NotConfined: a process of 2 threads cannot be confined" in done.stderr
