"""OpenAI's client for Node reads what it reads from OpenAI."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.router.conftest import Cluster

SCRIPT = Path(__file__).parents[1] / "support" / "openai_node.mjs"
VERSION = "6.49.0"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the client and the script."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not installed")
    folder = tmp_path_factory.mktemp("node")
    options = ("--no-audit", "--no-fund", "--ignore-scripts", "--fetch-retries=1")
    command = ["npm", "install", *options, "--prefix", str(folder), f"openai@{VERSION}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    if done.returncode:
        pytest.skip(f"npm could not fetch openai: {done.stderr.strip()[-200:]}")
    shutil.copy(SCRIPT, folder)
    return folder


async def test_the_client_for_node_reads_answers_streams_and_errors(
    cluster: Cluster, node: Path
) -> None:
    cluster.mock("w0")
    router = await cluster.router(1)
    running = await asyncio.create_subprocess_exec(
        "node",
        node / SCRIPT.name,
        f"{router.url}/v1",
        "mock",
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    output, errors = await asyncio.wait_for(running.communicate(), 60)
    assert running.returncode == 0, errors.decode()
    seen = json.loads(output)
    assert seen["models"] == ["mock"]
    assert seen["text"]
    assert seen["streamed"] == seen["text"]
    assert seen["finish"] == "length"
    assert seen["logprobs"] == seen["usage"]["completion_tokens"] == 12
    assert seen["streamedUsage"]["prompt_tokens"] == seen["usage"]["prompt_tokens"]
    assert seen["choices"] == 2
    assert seen["error"] == {"status": 400, "param": "temperature", "kind": "BadRequestError"}
