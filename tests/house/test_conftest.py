"""The run's own watch over processes: shown to fail when one is left behind."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.house.tree import ROOT

DAEMON = """
import subprocess, sys
from pathlib import Path
from tests import conftest

conftest._GRACE_S = 0.5

def test_that_starts_a_daemon():
    start = "import subprocess as s; print(s.Popen(['sleep', '60'], start_new_session=True).pid)"
    subprocess.run([sys.executable, "-c", start], stdout=Path("pid").open("w"), check=True)
"""

CHILD = """
import subprocess

def test_that_waits_for_its_child():
    subprocess.run(["true"], check=True)
"""


def run_pytest(directory: Path, test: str) -> subprocess.CompletedProcess[str]:
    """Run one test file in a process of its own, under this tree's conftest."""
    (directory / "test_it.py").write_text(test, "utf-8")
    command = [sys.executable, "-m", "pytest", "-c", "/dev/null", "--rootdir", ".", "-p"]
    return subprocess.run(
        [*command, "tests.conftest", "-o", f"pythonpath={ROOT}", "test_it.py"],
        cwd=directory,
        check=False,
        capture_output=True,
        text=True,
        timeout=240,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
    )


def test_a_daemon_left_behind_fails_the_run_and_is_ended(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, DAEMON)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert "left behind by tests of this run" in done.stdout
    assert "sleep 60" in done.stdout
    pid = int((tmp_path / "pid").read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_child_that_was_waited_for_is_no_reason_to_fail(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, CHILD)
    assert done.returncode == pytest.ExitCode.OK, done.stdout + done.stderr
