"""The docs keep up with the tree: modules are listed, links lead somewhere, design pages count on."""

import re
from collections import Counter
from pathlib import Path

import pytest

from tests.house.tree import ROOT, files, package_files

PAGES = [file for file in files() if file.suffix == ".md"]
DESIGN = [page for page in PAGES if page.parent == Path("docs/design")]

FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)
LISTED = re.compile(r"^\| `([\w/]+\.py)` \|", re.MULTILINE)
NAMED_PAGE = re.compile(r"\bdocs/[\w/.-]+\.md\b")


def text_of(page: Path) -> str:
    """Return a page without its code."""
    return FENCE.sub("", (ROOT / page).read_text("utf-8"))


def anchors(page: Path) -> set[str]:
    """Return the fragments that a page's headings can be linked by, as GitHub spells them."""
    titles = (re.sub(r"[^\w\- ]", "", title.lower()) for title in HEADING.findall(text_of(page)))
    return {title.replace(" ", "-") for title in titles}


def test_every_module_has_one_line_in_the_architecture() -> None:
    listed = Counter(LISTED.findall(text_of(Path("docs/architecture.md"))))
    modules = {
        file.as_posix()
        for file in package_files()
        if file.suffix == ".py" and file.name != "__init__.py"
    }
    assert {
        "missing": modules - listed.keys(),
        "not there": listed.keys() - modules,
        "twice": {name for name, count in listed.items() if count > 1},
    } == {"missing": set(), "not there": set(), "twice": set()}


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_inside_the_tree_lead_somewhere(page: Path) -> None:
    broken = []
    for target in LINK.findall(text_of(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, fragment = target.partition("#")
        found = (ROOT / page).parent / path if path else ROOT / page
        if not found.exists() or (
            fragment and fragment not in anchors(found.resolve().relative_to(ROOT))
        ):
            broken.append(target)
    assert broken == []


def test_pages_that_code_and_docs_name_are_there() -> None:
    named = {
        (file.as_posix(), name)
        for file in files()
        if file.suffix in {".py", ".md", ".toml", ".cpp"}
        for name in NAMED_PAGE.findall((ROOT / file).read_text("utf-8"))
    }
    assert {pair for pair in named if not (ROOT / pair[1]).is_file()} == set()


def test_design_pages_are_numbered_without_a_gap_and_named_by_their_number() -> None:
    assert [page.name[:4] for page in DESIGN] == [f"{n:04}" for n in range(1, len(DESIGN) + 1)]
    for page in DESIGN:
        assert HEADING.findall(text_of(page))[0].startswith(f"{page.name[:4]}: ")
