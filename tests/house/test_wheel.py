"""The wheel holds the tree's files: all of them, and nothing else."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.house.tree import ROOT, package_files

pytestmark = pytest.mark.xdist_group("wheel")

BUILD_FILES = ("LICENSE", "README.md", "pyproject.toml", "setup.py")


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Build a wheel from a copy of the tree's files, without a network, and list what is in it."""
    source = tmp_path_factory.mktemp("source")
    for file in [*package_files(), *map(Path, BUILD_FILES)]:
        target = source / file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, target)
    out = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, source],
        check=True,
        timeout=120,
    )
    (wheel,) = out.iterdir()
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_wheel_holds_exactly_the_trees_package_files(wheel_names: set[str]) -> None:
    expected = {f"pie/{file.as_posix()}" for file in package_files()}
    assert {name for name in wheel_names if ".dist-info/" not in name} == expected


def test_the_wheel_carries_its_licence_and_the_pie_command(wheel_names: set[str]) -> None:
    extras = {name.partition(".dist-info/")[2] for name in wheel_names}
    assert {"licenses/LICENSE", "entry_points.txt"} <= extras


def test_pie_has_no_init_of_its_own(wheel_names: set[str]) -> None:
    assert "pie/__init__.py" not in wheel_names
