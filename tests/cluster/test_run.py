"""`pie run` as a person types it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.program_folder import write_program_folder
from tests.support.serving import environment

pytestmark = pytest.mark.live

PROGRAM = '''
from pie.inferlet import Context, greedy


async def main(ctx: Context, prompt: str, max_tokens: int = 5, loud: bool = False):
    """Answer PROMPT, and say so."""
    print("printed")
    await ctx.say("said")
    await ctx.user(prompt).generate(greedy(), max_tokens)
    if loud:
        raise ValueError("too loud")
    if ctx.tools:
        return await ctx.tool("double", n=21)
    ctx.working_set.drop([999])
    return f"{ctx.working_set.length} slots"
'''


PIE_RUN = (sys.executable, "-m", "pie.cluster", "run")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_program_folder(tmp_path_factory.mktemp("run") / "model")


def pie_run(
    folder: Path, model: Path, *words: str, options: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    (folder / "tools.py").write_text("def double(n: int) -> int:\n    return 2 * n\n")
    (folder / "program.py").write_text(PROGRAM)
    settings = {
        "PIE_MODEL__DEVICE_KV_BUDGET": "4MiB",
        "PIE_MODEL__DTYPE": "float32",
        "PIE_MODEL__ATTENTION": "torch",
        "PIE_MODEL__CACHE_FOLDER": str(folder / "cache"),
    }
    return subprocess.run(
        [*PIE_RUN, "--model", str(model), *options, "program.py", *words],
        cwd=folder,
        env=environment(folder, settings),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_program_runs_and_what_it_says_prints_and_returns_is_shown(
    tmp_path: Path, model: Path
) -> None:
    done = pie_run(tmp_path, model, "--prompt", "Hello", "--max-tokens", "3")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()[:2]) == ["printed", "said"]
    assert done.stdout.splitlines()[2].endswith(" slots")
    assert done.stderr.splitlines()[-1].startswith(
        "warning: a call that nobody awaited failed: NeverWrittenError: "
    )


def test_a_program_that_raises_shows_its_line_and_ends_with_1(tmp_path: Path, model: Path) -> None:
    done = pie_run(tmp_path, model, "--prompt", "Hello", "--loud", "yes")
    assert done.returncode == 1
    assert 'File "program.py", line 11, in main' in done.stderr
    assert "ValueError: too loud" in done.stderr


def test_a_tool_that_is_granted_is_called(tmp_path: Path, model: Path) -> None:
    tool = ("--tool", "tools.py:double")
    done = pie_run(tmp_path, model, "--prompt", "Hello", options=tool)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "42"
    at = pie_run(
        tmp_path, model, "--prompt", "Hello", options=(*tool, "--at", "http://127.0.0.1:1")
    )
    assert at.returncode == 2
    assert "a cluster's tools are its workers' [programs] tools" in at.stderr


def test_help_and_mistakes_come_before_any_model_is_loaded(tmp_path: Path) -> None:
    nowhere = Path("/nonexistent")
    told = pie_run(tmp_path, nowhere, "--help")
    assert told.returncode == 0
    assert "Answer PROMPT, and say so." in told.stdout
    assert "--max-tokens INT" in told.stdout
    wrong = pie_run(tmp_path, nowhere, "--prompt", "x", "--max-tokens", "many")
    assert (wrong.returncode, wrong.stderr) == (2, "pie: max_tokens is of type int, not 'many'\n")
    late = pie_run(tmp_path, nowhere, "--prompt", "x", "--at", "http://127.0.0.1:1")
    behind = "pie: --at stands before the program: pie run --at … program.py\n"
    assert (late.returncode, late.stderr) == (2, behind)
    tool = pie_run(tmp_path, nowhere, "--prompt", "x", options=("--tool", "tools.py:treble"))
    assert tool.returncode == 2
    assert tool.stderr.startswith("pie: --tool: tools.py:treble cannot be had: AttributeError")
    missing = pie_run(tmp_path, nowhere, "--prompt", "x")
    assert missing.returncode == 2
    assert "/nonexistent" in missing.stderr
