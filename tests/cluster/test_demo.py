"""The demonstration shows what it should."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.serving import PIE, environment


@pytest.mark.live
@pytest.mark.xdist_group("command")
@pytest.mark.timeout(400)
def test_the_demonstration_ends_well(tmp_path: Path) -> None:
    done = subprocess.run(
        [*PIE, "demo"],
        cwd=tmp_path,
        env=environment(tmp_path, {"PIE_ROUTER__API_TOKEN": "open sesame"}),
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "pool=" in done.stdout
