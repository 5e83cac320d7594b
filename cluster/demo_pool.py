"""`pie demo-pool`: a conversation that outlives the cluster, because its pages lie in an object store.

Starts a real S3 server, a cluster with a bucket under its pool, and a conversation; stops every process
of the cluster; starts it anew and goes on. Does not cover starting either (`pie.cluster.local_s3`,
`pie.cluster.launch`).
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from pie.cluster.config import PieConfig
from pie.cluster.demo import LAST_TURN, SYSTEM, TURNS, Answer, alone, ask, show
from pie.cluster.errors import StartError
from pie.cluster.launch import Report, running
from pie.cluster.local_s3 import BUCKET, ENVIRONMENT, LocalS3
from pie.cluster.status import fetch_status

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionMessageParam

    Conversation = list[ChatCompletionMessageParam]

_KEPT_WAIT_S = 60.0
_KEPT_POLL_S = 0.5


def run_pool_demo(config: PieConfig, console: Console, report: Report) -> bool:
    """Run the demonstration; True where everything that it should show was seen.

    Raises:
        StartError: The S3 server or the cluster cannot start, or a package is missing.
    """
    with tempfile.TemporaryDirectory(prefix="pie-demo-") as name:
        folder = Path(name)
        server = LocalS3(folder)
        report("s3", "starting")
        before = {key: os.environ.get(key) for key in ENVIRONMENT}
        # Taken from there by boto3, in the node that Ray starts.
        os.environ.update(ENVIRONMENT)
        try:
            server.start()
            report("s3", f"ready at {server.url}")
            return _show(_with_bucket(config, folder, server.url), console, report)
        finally:
            server.stop()
            for key, value in before.items():
                if value is None:
                    del os.environ[key]
                else:
                    os.environ[key] = value


def _with_bucket(config: PieConfig, folder: Path, url: str) -> PieConfig:
    """Keep pages in the bucket alone, once a cluster is gone."""
    index = config.index.model_copy(update={"url": "", "data_dir": folder / "index"})
    pool = config.pool.model_copy(
        update={
            "nodes": max(1, config.pool.nodes),
            "disk_budget": 0,
            "disk_folders": (folder / "pages",),
            "object_bucket": BUCKET,
            "object_endpoint_url": url,
            "object_write_through": True,
        }
    )
    # In bfloat16 other batches round otherwise, and then the same answer may differ by a word.
    model = config.model.model_copy(update={"dtype": "float32", "disk_kv_budget": 0})
    router = alone(config.router)
    return config.model_copy(
        update={"index": index, "pool": pool, "model": model, "router": router}
    )


def _show(config: PieConfig, console: Console, report: Report) -> bool:
    conversation: Conversation = [{"role": "system", "content": SYSTEM}]
    first = _talk(config, console, report, conversation, [*TURNS, LAST_TURN], is_first=True)
    console.print("All processes of the cluster are gone; the bucket is not.\n", style="bold")
    # What was said last is asked again.
    del conversation[-2:]
    again = _talk(config, console, report, conversation, [LAST_TURN], is_first=False)[0]
    show([*first, again], console)
    page_tokens = config.model.page_tokens
    # The last few pages may be cheaper to compute than to load, and are computed then.
    wanted = again.prompt_tokens // page_tokens * page_tokens * 3 // 4
    problems = []
    if again.cached_tokens < wanted:
        problems.append(f"{again.cached_tokens} tokens came from pages, and {wanted} should have")
    if "pool" not in again.cached_from:
        problems.append(f"pages came from {again.cached_from or 'nowhere'}, not from the pool")
    if again.text != first[-1].text:
        problems.append(f"the answer was {first[-1].text!r} before")
    for problem in problems:
        console.print(problem, style="bold red", markup=False)
    return not problems


def _talk(
    config: PieConfig,
    console: Console,
    report: Report,
    conversation: Conversation,
    questions: list[str],
    *,
    is_first: bool,
) -> list[Answer]:
    """Start a cluster, ask, wait until the bucket has it all, and stop the cluster."""
    try:
        from openai import OpenAI  # noqa: PLC0415
    except ImportError as error:
        raise StartError(
            "pie demo-pool talks through the openai package: pip install openai"
        ) from error
    answers = []
    with running(config, report) as (_cluster, addresses):
        token = config.router.api_token.get_secret_value()
        with OpenAI(
            base_url=f"{addresses.router}/v1", api_key=token or "none", max_retries=0
        ) as client:
            model = client.models.list().data[0].id
            for number, question in enumerate(questions, start=1):
                conversation.append({"role": "user", "content": question})
                name = f"turn {number}" if is_first else "after the restart"
                answer = ask(client, model, conversation, name)
                conversation.append({"role": "assistant", "content": answer.text})
                console.print(question, style="bold", markup=False, highlight=False)
                console.print(f"{answer.text.strip()}\n", markup=False, highlight=False)
                answers.append(answer)
        if is_first:
            report("s3", f"holds {_await_bucket(addresses.router, token)} pages")
    return answers


def _await_bucket(router: str, token: str) -> int:
    """Wait until what the workers have made is in the bucket; return how many pages that is.

    Raises:
        StartError: It does not get there.
    """
    deadline_s = time.monotonic() + _KEPT_WAIT_S
    before = (-1, -1)
    while time.monotonic() < deadline_s:
        pool = [node.gauges for node in fetch_status(router, token).pool]
        ram = int(sum(node.get("pages.pool_ram", 0) for node in pool))
        kept = int(sum(node.get("pages.pool_object", 0) for node in pool))
        waiting = sum(node.get("object_buffered_bytes", 0) for node in pool)
        if 0 < ram <= kept and not waiting and (ram, kept) == before:
            return kept
        before = (ram, kept)
        time.sleep(_KEPT_POLL_S)
    raise StartError("the pages of the conversation did not get into the bucket")
