"""Every program that ships, on a live cluster of two workers with SmolLM2."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from pie.inferlet.client import RunEvent, Where, run_upload
from pie.inferlet.upload import Upload
from tests.house.tree import ROOT
from tests.support.serving import Serving, environment

pytestmark = [pytest.mark.live, pytest.mark.xdist_group("cluster"), pytest.mark.timeout(400)]

PROGRAMS = ROOT / "examples/inferlets"
FEW: dict[str, object] = {"max_tokens": 6}
ARGUMENTS: dict[str, dict[str, object]] = {
    "agent": {"prompt": "What is 17 times 3?", "steps": 2, "max_tokens": 48},
    "attention-sink": {"prompt": "Tell me about lighthouses.", "window": 24} | FEW,
    "beam-search": {"prompt": "Name a river.", "width": 2} | FEW,
    "cache-explorer": {"prompt": "One light.|One light. And another one."},
    "constrained-json": {
        "prompt": "Tom has 3 apples.",
        "schema": '{"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, '
        '"maximum": 99}}, "required": ["n"], "additionalProperties": false}',
    },
    "contrastive": {"document": "The lamp is green.", "prompt": "Which colour is it?"} | FEW,
    "consensus": {"prompt": "What is two and two?", "answers": 2} | FEW,
    "prefix-tree": {"document": "The light is red.", "questions": "Which colour?|What?"} | FEW,
    "snapkv-eviction": {"prompt": "The sea was calm, and the gulls were loud. " * 6} | FEW,
    "speculative": {"prompt": "Say again and again: a b a b a b a b"} | FEW,
    "tova-attention": {"prompt": "Why is the sky blue?", "budget": 24} | FEW,
    "tree-of-thought": {
        "prompt": "What is 2 + 3 * 4?",
        "depth": 1,
        "branches": 2,
        "keep": 1,
        "step_tokens": 8,
    }
    | FEW,
    "trackb-h2o": {"prompt": "Why is the sea salty?", "heavy": 12, "recent": 12} | FEW,
}


async def ran(cluster: Serving, name: str) -> list[RunEvent]:
    upload = Upload(f"{name}.py", (PROGRAMS / f"{name}.py").read_text("utf-8"), "main")
    stream = run_upload(upload, Where(cluster.url), {"arguments": ARGUMENTS[name]})
    return [event async for event in stream]


async def test_all_programs_run_and_both_workers_take_some(cluster: Serving) -> None:
    assert set(ARGUMENTS) == {path.stem for path in PROGRAMS.glob("*.py")}
    told = await asyncio.gather(*(ran(cluster, name) for name in ARGUMENTS))
    for name, events in zip(ARGUMENTS, told, strict=True):
        assert events[-1].reason == "finished", f"{name}: {events[-1].error}"
        assert events[-1].result, name
    assert set(Counter(events[0].worker for events in told)) == {"worker-0", "worker-1"}


def pie_run(folder: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "pie.cluster", "run", *words],
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_pie_run_runs_a_program_at_a_router(cluster: Serving, tmp_path: Path) -> None:
    words = ["--prompt", "What is a lighthouse?", "--max-tokens", "8"]
    path = str(PROGRAMS / "attention-sink.py")
    said, answer = pie_run(tmp_path, "--at", cluster.url, path, *words).splitlines()[:2]
    assert " slots written" in said
    assert answer


@pytest.mark.soak
@pytest.mark.parametrize("name", ARGUMENTS)
def test_pie_run_runs_every_program_on_a_model_of_its_own(name: str, tmp_path: Path) -> None:
    words = [
        word
        for key, value in ARGUMENTS[name].items()
        for word in (f"--{key.replace('_', '-')}", str(value))
    ]
    assert pie_run(tmp_path, str(PROGRAMS / f"{name}.py"), *words)
