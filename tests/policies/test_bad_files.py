"""Every kind of bad policy file: all that is wrong is listed, and nothing is made of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from pie.policies.errors import PolicyFileError
from pie.policies.loader import load_policies, load_policy_file
from tests.policies.bad_files import BAD_FILES, BadFile, write_modules


@pytest.mark.parametrize("bad", BAD_FILES, ids=lambda bad: bad.name)
def test_all_that_is_wrong_with_a_file_is_listed_and_no_more(bad: BadFile, tmp_path: Path) -> None:
    write_modules(tmp_path)
    with pytest.raises(PolicyFileError) as caught:
        load_policies(bad.text, name="p.yaml", folder=tmp_path)
    told = [str(problem) for problem in caught.value.problems]
    assert len(told) == len(bad.said)
    for problem, said in zip(told, bad.said, strict=True):
        assert said in problem
        assert "\n" not in problem


def test_a_file_of_10_mb_is_refused_by_its_size(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_bytes(b"# " + b"x" * 10_000_000)
    with pytest.raises(PolicyFileError, match="is larger than 1 MiB"):
        load_policy_file(tmp_path / "p.yaml")


@pytest.mark.parametrize(
    "text",
    [
        "worker: {retention: lfu}\r\ncluster: {routing: round-robin}\r\n",
        "\ufeffworker: {retention: lfu}\ncluster: {routing: round-robin}\n",
        "%YAML 1.1\n---\nworker: {retention: lfu}\ncluster: {routing: round-robin}\n...\n",
        "&a worker: &b {retention: &c lfu}\ncluster: {routing: round-robin}\n",
    ],
)
def test_what_editors_leave_in_a_file_is_no_mistake(text: str) -> None:
    policies = load_policies(text.encode(), name="p.yaml")
    assert (policies.retention.name, policies.routing.name) == ("lfu", "round-robin")
