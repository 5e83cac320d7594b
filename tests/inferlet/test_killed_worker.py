"""A worker that is killed takes its programs with it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest


@pytest.mark.live
def test_a_program_does_not_outlive_its_worker(model_folder: Path, tmp_path: Path) -> None:
    worker = subprocess.Popen(
        [sys.executable, "-m", "tests.inferlet.worker_process", str(model_folder), str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "running\n"
        programs = psutil.Process(worker.pid).children()
        assert len(programs) == 1
    finally:
        worker.kill()
        worker.wait(60)
        if worker.stdout is not None:
            worker.stdout.close()
    gone, left = psutil.wait_procs(programs, timeout=60)
    assert (len(gone), left) == (1, [])
