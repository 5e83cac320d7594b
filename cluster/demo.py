"""`pie demo`: a real cluster, a real client, and a table of what was not computed.

Three turns of one conversation, a burst of questions over one long document, then the
conversation's next turn sent to the worker that has not seen it, so that its pages come from the
pool. Every text that is printed is the model's. Does not cover starting the cluster
(`pie.cluster.launch`).
"""

from __future__ import annotations

import importlib.metadata
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from pie.cluster.config import PieConfig
from pie.cluster.errors import StartError
from pie.cluster.launch import Report, running
from pie.cluster.printing import new_table
from pie.cluster.status import fetch_status
from pie.router.settings import RouterSettings

if TYPE_CHECKING:
    from openai import OpenAI
    from openai.types.chat import ChatCompletionMessageParam

_ANSWER_TOKENS = 48
_POOL_WAIT_S = 30.0
_POOL_POLL_S = 0.2
_WANTED_SHARE = 0.9
"""Least share of a later turn's full pages that must not be computed again."""

SYSTEM = """\
You are the guide of a small harbour museum. Answer in one or two short sentences, and only from
what the notes say. The notes follow.

The harbour was dug in 1874 by Ada Lund, an engineer from Bergen, for the herring fleet. Its first
lighthouse stood on the northern pier: an iron tower of eleven metres with an oil lamp that had to
be filled every four hours. The keeper, Jonas Weil, kept a diary for thirty-one years; it lies in
the first room, open at the night of the great storm of 1893, when fourteen boats came in behind
the rope that he had stretched across the harbour mouth. In 1911 the oil lamp gave way to an
electric one, fed by a small power house that also lit the fish market. The second room shows the
market: scales, barrels, the bell that opened the auction at five in the morning, and a photograph
of Marta Brandt, who ran it from 1922 to 1949 and could price a catch by its smell. The third room
belongs to the boats. The largest is the Petrel, a cutter of eighteen metres built in 1898 and
sailed until 1961; children may board her. Beside her lie a pilot's dinghy and half a lifeboat, cut
open so that its air tanks can be seen. The museum opens at ten and closes at five, on Mondays not
at all. The ticket costs six crowns, and nothing for those under twelve. The café on the pier
serves fish soup until it is gone."""

TURNS = (
    "Who dug the harbour, and when?",
    "What did the keeper do in the great storm?",
    "Which boat may children board?",
)
LAST_TURN = "When does the museum open?"

_QUESTIONS = (
    "May I sell software that is under this licence?",
    "Must I publish my changes?",
    "Does the licence grant a patent licence?",
    "What must I keep in the files that I hand on?",
    "Is there a warranty?",
    "May I use the contributor's trademarks?",
)


@dataclass(frozen=True)
class Answer:
    """One answered request."""

    name: str
    worker: str
    prompt_tokens: int
    cached_tokens: int
    cached_from: str
    first_token_s: float
    tokens_per_s: float
    text: str


def run_demo(config: PieConfig, console: Console, report: Report) -> bool:
    """Run the demonstration; True where everything that it should show was seen.

    Raises:
        StartError: The cluster cannot start, or the `openai` package is missing.
    """
    try:
        from openai import OpenAI  # noqa: PLC0415
    except ImportError as error:
        raise StartError("pie demo talks through the openai package: pip install openai") from error
    if config.cluster.workers < 2 or config.pool.nodes < 1:
        raise StartError(
            "pie demo needs cluster.workers of at least 2 and pool.nodes of at least 1"
        )
    with (
        tempfile.TemporaryDirectory(prefix="pie-demo-") as folder,
        running(_apart(config, Path(folder)), report) as (_cluster, addresses),
    ):
        token = config.router.api_token.get_secret_value()
        client = OpenAI(base_url=f"{addresses.router}/v1", api_key=token or "none", max_retries=0)
        with client:
            demo = _Demo(client, addresses.router, token, list(addresses.workers), console)
            return demo.run(config.model.page_tokens)


def alone(router: RouterSettings) -> RouterSettings:
    """Return a router that only this machine reaches, and whoever is on it without a key."""
    closed = {"host": "127.0.0.1", "keys_file": None, "tls_cert_file": None, "tls_key_file": None}
    return router.model_copy(update=closed)


def _apart(config: PieConfig, folder: Path) -> PieConfig:
    """Keep the demonstration's places out of the index of a cluster that runs already."""
    index = config.index.model_copy(update={"url": "", "data_dir": folder / "index"})
    router = alone(config.router).model_copy(update={"allow_place_header": True})
    return config.model_copy(update={"index": index, "router": router})


class _Demo:
    def __init__(
        self, client: OpenAI, router: str, token: str, workers: list[str], console: Console
    ) -> None:
        self._client = client
        self._router = router
        self._token = token
        self._workers = workers
        self._console = console
        self._model = client.models.list().data[0].id

    def run(self, page_tokens: int) -> bool:
        """Hold the conversation, the burst and the moved turn; say whether all was as it should."""
        conversation: list[ChatCompletionMessageParam] = [{"role": "system", "content": SYSTEM}]
        turns = [
            self._turn(conversation, f"turn {number}", question)
            for number, question in enumerate(TURNS, start=1)
        ]
        burst = self._burst()
        self._await_pool()
        other = next(name for name in self._workers if name != turns[-1].worker)
        moved = self._turn(conversation, "turn 4, moved", LAST_TURN, place=other)
        show([*turns, *burst, moved], self._console)
        problems = [
            f"{turn.name} computed more than {1 - _WANTED_SHARE:.0%} of its full pages anew"
            for turn in [*turns[1:], moved]
            if turn.cached_tokens
            < _WANTED_SHARE * (turn.prompt_tokens // page_tokens * page_tokens)
        ]
        if moved.worker != other or "pool" not in moved.cached_from:
            problems.append(f"{moved.name} was not fed from the pool")
        for problem in problems:
            self._console.print(problem, style="bold red", markup=False)
        return not problems

    def _turn(
        self,
        conversation: list[ChatCompletionMessageParam],
        name: str,
        question: str,
        place: str | None = None,
    ) -> Answer:
        conversation.append({"role": "user", "content": question})
        answer = self._ask(conversation, name, place)
        conversation.append({"role": "assistant", "content": answer.text})
        self._print(question, answer)
        return answer

    def _print(self, question: str, answer: Answer) -> None:
        self._console.print(question, style="bold", markup=False, highlight=False)
        self._console.print(f"{answer.text.strip()}\n", markup=False, highlight=False)

    def _burst(self) -> list[Answer]:
        document = _document()
        prompts: list[list[ChatCompletionMessageParam]] = [
            [
                {"role": "system", "content": f"Answer from this licence:\n\n{document}"},
                {"role": "user", "content": question},
            ]
            for question in _QUESTIONS
        ]
        first = self._ask(prompts[0], "document 1")
        with ThreadPoolExecutor(len(prompts)) as threads:
            rest = threads.map(
                lambda pair: self._ask(pair[1], f"document {pair[0]}"),
                enumerate(prompts[1:], start=2),
            )
            answers = [first, *rest]
        for question, answer in zip(_QUESTIONS, answers, strict=True):
            self._print(question, answer)
        return answers

    def _ask(
        self,
        messages: list[ChatCompletionMessageParam],
        name: str,
        place: str | None = None,
    ) -> Answer:
        return ask(self._client, self._model, messages, name, place)

    def _await_pool(self) -> None:
        """Wait until the pool holds what the workers have made."""
        deadline_s = time.monotonic() + _POOL_WAIT_S
        before = -1
        while time.monotonic() < deadline_s:
            status = fetch_status(self._router, self._token)
            pages = sum(sum(node.pages.values()) for node in status.pool)
            if pages and pages == before:
                return
            before = pages
            time.sleep(_POOL_POLL_S * 5)


def ask(
    client: OpenAI,
    model: str,
    messages: list[ChatCompletionMessageParam],
    name: str,
    place: str | None = None,
) -> Answer:
    """Ask greedily, at one place where that is named, and return answer and timing."""
    start_s = time.perf_counter()
    first_s: float | None = None
    pieces: list[str] = []
    usage = None
    raw = client.chat.completions.with_raw_response.create(
        model=model,
        messages=messages,
        max_tokens=_ANSWER_TOKENS,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_headers={"x-pie-place": place} if place else {},
    )
    for event in raw.parse():
        if event.choices and event.choices[0].delta.content:
            first_s = first_s or time.perf_counter()
            pieces.append(event.choices[0].delta.content)
        usage = event.usage or usage
    end_s = time.perf_counter()
    assert usage is not None
    first_s = first_s or end_s
    details = usage.prompt_tokens_details
    return Answer(
        name=name,
        worker=raw.headers["x-pie-worker"],
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=(details.cached_tokens if details else 0) or 0,
        cached_from=raw.headers.get("x-pie-cached-from", ""),
        first_token_s=first_s - start_s,
        tokens_per_s=(usage.completion_tokens - 1) / max(end_s - first_s, 1e-9),
        text="".join(pieces),
    )


def show(answers: list[Answer], console: Console) -> None:
    """Print what was computed for each answer, and what was not."""
    table = new_table(
        "request",
        "worker",
        "prompt",
        "cached",
        "from",
        "first token",
        "tok/s",
        left=("worker", "from"),
        no_wrap=True,
    )
    table.title, table.header_style = "What was computed, and what was not", "bold underline"
    for one in answers:
        table.add_row(
            one.name,
            one.worker,
            str(one.prompt_tokens),
            str(one.cached_tokens),
            one.cached_from,
            f"{one.first_token_s * 1000:.0f} ms",
            f"{one.tokens_per_s:.1f}",
        )
    console.print(table)


def _document() -> str:
    """Return a long text that every installation has: the licence."""
    for file in importlib.metadata.files("pie-serve") or ():
        if file.name == "LICENSE":
            return file.read_text(encoding="utf-8")
    raise StartError("the licence is missing from this installation of Pie")
