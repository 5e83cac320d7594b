"""Every kind of bad policy file: all that is wrong is listed, and nothing is made of it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from pie.policies import reading
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


def test_a_file_that_names_nothing_is_warned_of() -> None:
    for text in ("", "# nothing yet\n", "null\n", "{}"):
        (warning,) = load_policies(text, name="p.yaml").warnings
        assert warning.told("p.yaml") == "p.yaml: names nothing, so that all is built in"
    assert not load_policies("worker:\n", name="p.yaml").warnings


def _nothing(file: Path) -> None:
    """Make none."""


def _forbidden(file: Path) -> None:
    file.write_text("worker: {}")
    file.chmod(0)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (_nothing, "No such file or directory"),
        (Path.mkdir, "Is a directory"),
        (lambda file: file.symlink_to(file.name), "Too many levels of symbolic links"),
        (lambda file: file.symlink_to("gone.yaml"), "No such file or directory"),
        (os.mkfifo, "it is a pipe that nobody has written to its end in 0.01 s"),
        pytest.param(
            _forbidden,
            "Permission denied",
            marks=pytest.mark.skipif(os.geteuid() == 0, reason="root may read anything"),
        ),
    ],
)
def test_what_cannot_be_read_is_told_in_a_sentence(
    make: Callable[[Path], object], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_PIPE_S", 0.01)
    make(tmp_path / "p.yaml")
    with pytest.raises(PolicyFileError) as caught:
        load_policy_file(tmp_path / "p.yaml")
    assert str(caught.value) == f"{tmp_path / 'p.yaml'}: cannot be read: {said}"


@pytest.mark.parametrize("is_there_first", [False, True])
def test_a_pipe_is_read_to_its_end(is_there_first: bool, tmp_path: Path) -> None:
    pipe = tmp_path / "p.yaml"
    os.mkfifo(pipe)
    opened, going = threading.Event(), threading.Event()

    def write() -> None:
        with pipe.open("w") as stream:
            opened.set()
            stream.write("worker: {retention: lfu}\n")
            stream.flush()
            going.wait(30)
            stream.write(f"cluster: {{routing: round-robin}}\n#{'x' * 200_000}")

    writer = threading.Thread(target=write)
    writer.start()
    if is_there_first:
        # Its own end, so that the writer finds somebody who reads.
        end = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        assert opened.wait(30)
        going.set()
        found = load_policy_file(pipe)
        os.close(end)
    else:
        going.set()
        found = load_policy_file(pipe)
    writer.join(30)
    assert (found.retention.name, found.routing.name) == ("lfu", "round-robin")
