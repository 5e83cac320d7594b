"""Workers, routers and Redis are killed, emptied and paused under fifty streams; no token goes wrong."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
import redis
import uvloop

from tests.support.serving import Serving

log = logging.getLogger(__name__)

STREAMS = 50
TOKENS = 16
GIVE_UP_S = 240.0
"""For one answer, however often it is asked for."""
PROMPTS = [
    f"{subject} is a thing that people have talked about for a long time, because"
    for subject in ("Rain", "Bread", "The sea", "A bridge", "Silence", "The moon", "Salt", "Wool")
]


@dataclass
class Crowd:
    """Clients that ask one after the other, and what became of their answers."""

    url: str
    expected: dict[str, str]
    ended: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    is_over: bool = False

    async def run(self) -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=120, limits=limits) as client:
            await asyncio.gather(*(self._ask_on(client, number) for number in range(STREAMS)))

    async def _ask_on(self, client: httpx.AsyncClient, number: int) -> None:
        prompts = list(self.expected)
        turn = number
        while not self.is_over:
            prompt = prompts[turn % len(prompts)]
            turn += 1
            deadline_s = time.monotonic() + GIVE_UP_S
            while not await self._ask(client, prompt):
                assert time.monotonic() < deadline_s, f"no answer to {prompt!r} in time"
                await asyncio.sleep(0.5)

    async def _ask(self, client: httpx.AsyncClient, prompt: str) -> bool:
        """Ask once; whether there was an answer to the end."""
        body = {
            "model": "smollm2",
            "prompt": prompt,
            "max_tokens": TOKENS,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
        }
        text, finish = "", ""
        expected = self.expected[prompt]
        try:
            async with client.stream("POST", f"{self.url}/v1/completions", json=body) as answer:
                if answer.status_code in (429, 503):
                    self.ended[str(answer.status_code)] += 1
                    return False
                assert answer.status_code == 200, await answer.aread()
                async for line in answer.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    event = json.loads(line.removeprefix("data: "))
                    assert "error" not in event, event
                    choice = event["choices"][0]
                    text += choice["text"]
                    finish = choice["finish_reason"] or finish
                    if not expected.startswith(text):
                        self.wrong.append(f"{text!r} for {expected!r}")
                        return True
        except httpx.TransportError:
            # Its router died: a client can only ask anew, but what it has was right.
            self.ended["broken" if text else "refused"] += 1
            return False
        if text != expected or finish != "length":
            self.wrong.append(f"{text!r} ({finish}) for {expected!r}")
        self.ended["whole"] += 1
        return True


@pytest.fixture
def serving(temporary: Path) -> Iterator[Serving]:
    settings = {
        "PIE_CLUSTER__WORKERS": "2",
        "PIE_MODEL__DTYPE": "float32",
        "PIE_ROUTER__WORKER_WAIT_S": "90",
        "PIE_ROUTER__ATTEMPTS": "12",
    }
    serving = Serving(temporary, settings)
    try:
        serving.wait_until_said("Ctrl-C stops it")
        serving.wait_until_ready(workers=2)
        yield serving
    finally:
        serving.stop()


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


async def chaos(serving: Serving, crowd: Crowd) -> None:
    """Break one thing after the other, each while answers are under way, and let it mend."""

    async def more_answers(count: int) -> None:
        goal = crowd.ended["whole"] + count
        deadline_s = time.monotonic() + GIVE_UP_S
        while crowd.ended["whole"] < goal and not crowd.wrong:
            assert time.monotonic() < deadline_s, f"it stands still: {crowd.ended}"
            await asyncio.sleep(0.2)

    def flush() -> None:
        path = Path(serving.folder / "index")
        sockets = list(path.rglob("*.sock"))
        with redis.Redis(unix_socket_path=str(sockets[0])) as client:
            client.flushall()

    await more_answers(STREAMS)
    await asyncio.to_thread(flush)
    await more_answers(STREAMS)
    index = serving.index_pid()
    os.kill(index, signal.SIGSTOP)
    await more_answers(STREAMS // 2)
    os.kill(index, signal.SIGCONT)
    kill(serving.pids("WorkerActor")[0])
    await more_answers(STREAMS)
    kill(serving.index_pid())
    await more_answers(STREAMS)
    await asyncio.to_thread(serving.wait_until_ready, 2, GIVE_UP_S)
    kill(serving.pids("RouterActor")[0])
    await more_answers(STREAMS)
    kill(serving.pids("WorkerActor")[-1])
    await more_answers(STREAMS)
    crowd.is_over = True


@pytest.mark.soak
@pytest.mark.live
@pytest.mark.timeout(1800)
def test_no_client_sees_a_wrong_repeated_or_missing_token(serving: Serving) -> None:
    expected: dict[str, str] = {}
    for prompt in PROMPTS:
        body = {"model": "smollm2", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
        answer = httpx.post(
            f"{serving.url}/v1/completions", json=body | {"ignore_eos": True}, timeout=120
        )
        expected[prompt] = answer.json()["choices"][0]["text"]
    crowd = Crowd(serving.url, expected)

    async def run() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(crowd.run())
            group.create_task(chaos(serving, crowd))

    uvloop.run(run())
    log.info("answers of %d clients: %s", STREAMS, dict(crowd.ended))
    assert crowd.wrong == []
    assert crowd.ended["whole"] >= 5 * STREAMS
    # Only the one router's death broke streams, each once.
    assert crowd.ended["broken"] <= STREAMS
