"""The tree's own rules: sizes, names, links and the mapping of folders onto `pie`."""

import importlib
import tomllib
from pathlib import Path

import pytest

from tests.house.tree import FOLDERS, ROOT, files

LINES_AT_MOST = 500


def test_no_python_file_is_too_long_to_read() -> None:
    lengths = {
        str(file): len((ROOT / file).read_text("utf-8").splitlines())
        for file in files()
        if file.suffix == ".py"
    }
    assert {name: n for name, n in lengths.items() if n > LINES_AT_MOST} == {}


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_is_imported_as_a_part_of_pie(folder: str) -> None:
    module = importlib.import_module(f"pie.{folder}")
    assert module.__file__ is not None
    assert Path(module.__file__) == ROOT / folder / "__init__.py"


def test_pie_is_a_namespace_that_others_may_join() -> None:
    assert importlib.import_module("pie").__file__ is None


def test_type_checkers_have_one_relative_link_for_each_folder() -> None:
    links = {link.name: link for link in (ROOT / "typings/pie").iterdir()}
    assert sorted(links) == sorted(FOLDERS)
    for name, link in links.items():
        assert link.is_symlink()
        assert link.readlink() == Path("../..", name)


def test_every_folder_has_a_place_in_the_import_map() -> None:
    configuration = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    linter = configuration["tool"]["importlinter"]
    assert linter["root_packages"] == [f"pie.{folder}" for folder in FOLDERS]


def test_every_folder_is_barred_from_bare_imports() -> None:
    configuration = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    banned = configuration["tool"]["ruff"]["lint"]["flake8-tidy-imports"]["banned-api"]
    assert set(FOLDERS) <= set(banned)


def test_every_version_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert pins
    assert [pin for pin in pins if pin.count("==") != 1 or "+" in pin] == []


def test_tests_are_sorted_by_the_folder_they_test() -> None:
    tests = [file for file in files() if file.parts[0] == "tests" and file.name.startswith("test_")]
    homes = {file.parts[1] for file in tests}
    assert homes - {*FOLDERS, "house", "system"} == set()
