"""`pie simulate` from the command line."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pie.cluster.cli import app

LONG = "[x]-least-loaded-" + "and-so-on-" * 9
TRACE = "arrival_s,prompt_tokens,output_tokens,session\n" + "".join(
    f"{at * 0.3},{600 + 40 * at},20,s{at % 2}\n" for at in range(20)
)

ONCE = """
class Once:
    made = 0

    def __init__(self):
        Once.made += 1
        if Once.made > 1:
            raise ValueError("no second one")

    def choose(self, request, workers): ...
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trace.csv").write_text(TRACE)
    (tmp_path / "even.yaml").write_text("cluster: {routing: round-robin}")
    (tmp_path / "bad.yaml").write_text("worker: {retention: lruu}\ncluster: 3")
    (tmp_path / "once.yaml").write_text("cluster: {routing: 'once:Once'}")
    (tmp_path / "once.py").write_text(ONCE)
    (tmp_path / f"{LONG}.yaml").write_text("cluster: {routing: least-loaded}")
    return tmp_path


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["simulate", *arguments])
    return result.exit_code, result.output


def test_two_policy_files_are_compared_and_written(folder: Path) -> None:
    code, said = run(
        *("--trace", "trace.csv", "--compare", "even.yaml", "--page-tokens", "16"),
        *("--compare", f"{LONG}.yaml"),
        *("--pages", "200", "--workers", "2", "--json", "out.json", "--html", "out.html"),
    )
    assert code == 0, said
    assert "built-in" in said
    assert "20 requests; 2 workers, each with room for 200 pages of 16 tokens; " in said
    assert ": a first token after " in said
    assert "written: out.html" in said
    names = [report["name"] for report in json.loads((folder / "out.json").read_text())]
    assert names == ["built-in", "even", LONG]
    (row,) = [line for line in said.splitlines() if re.match(rf"{re.escape(LONG)} ", line)]
    assert len(row.split()) == 13, "a name, a rate, four times and a multiple of the mean"
    assert (folder / "out.html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "--trace is missing"),
        (("--trace", "trace.csv", "--pool-stores", "no"), "must be `behind` or `spill`, not 'no'"),
        (("--trace", "none.csv"), "none.csv: cannot be read: No such file"),
        (("--trace", "trace.csv", "--workers", "0"), "workers must be from 1 to 10,000, not 0"),
        (("--trace", "trace.csv", "--pages", "1"), "request 1 has 620 tokens"),
        (("--trace", "even.yaml"), "even.yaml: line 1: column `arrival_s` is missing"),
        (("--trace", "trace.csv", "--policies", "trace.csv"), "trace.csv"),
        (("--trace", "trace.csv", "--policies", "bad.yaml"), "pie: bad.yaml:2:10: cluster: "),
        (("--trace", "trace.csv", "--cost", "even.yaml"), "even.yaml: is not a cost model"),
        (("--calibrate", "--at", "http://127.0.0.1:9"), "no router answers at"),
        (
            ("--trace", "trace.csv", "--policies", "once.yaml"),
            "pie: a new once:Once cannot be made: ValueError: no second one",
        ),
    ],
)
@pytest.mark.usefixtures("folder")
def test_what_cannot_be_simulated_is_told_in_one_sentence(
    arguments: tuple[str, ...], said: str
) -> None:
    code, output = run(*arguments)
    assert code == 2
    assert said in output
    assert all(line.startswith("pie: ") for line in output.splitlines())
