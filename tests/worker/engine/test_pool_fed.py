"""Pages from a real pool node give what transformers' `generate` gives, in float32.

One engine makes the pages and stores them; another, which has computed nothing, is fed from the
pool. Exchanging one page for another text's on the way must show.
"""

from __future__ import annotations

import functools
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from pie.page.events import Epoch, Part, PlaceId
from pie.page.groups import group_keys
from pie.page.header import PageHeader
from pie.page.key import page_keys
from pie.pool.checksum import Checksum
from pie.pool.client import PoolClient
from pie.pool.node import PoolNode
from pie.pool.settings import PoolSettings
from pie.pool.tier import PageId, StoredPage
from pie.tokens.tokenizer import Tokenizer
from pie.wire.messages import PutStatus
from pie.worker import offload
from pie.worker.load_choice import LoadTier
from pie.worker.model import Model
from pie.worker.page_copies import PageNames
from pie.worker.runner import Runner
from pie.worker.selfcheck import verify
from tests.pool.places import Places
from tests.support.models import RECURRENT, smollm2, tiny_model, tiny_module
from tests.worker.engine.device import device
from tests.worker.engine.driver import Answer
from tests.worker.engine.test_models import expect, prompts
from tests.worker.engine.threaded import Threaded, Untimed

SECRET = b"s" * 32
TEXT = (
    "The lighthouse keeper counted the ships that passed each night, and wrote their names into a "
    "book that nobody else would ever read. When the fog came he rang the bell by hand, once every "
    "minute, until the morning wind carried it out to sea again and he could sleep."
)


@dataclass(frozen=True)
class Subject:
    """A model, what it must equal, and what to ask it."""

    model: Model
    reference: PreTrainedModel
    tokenizer: Tokenizer
    prompts: Sequence[list[int]]
    answer_tokens: int
    pages: int

    @property
    def page_tokens(self) -> int:
        return self.model.layout.page_tokens

    def full(self, prompt: list[int]) -> int:
        """Tokens of a prompt that need not be computed once its full pages are there."""
        if self.model.states:
            return (len(prompt) - 1) // self.page_tokens * self.page_tokens
        return min(len(prompt) // self.page_tokens * self.page_tokens, len(prompt) - 1)


@functools.cache
def tiny(kind: str, tokenizer: Tokenizer) -> Subject:
    model = tiny_model(kind, page_tokens=8)
    if model.states:
        model = verify(model)
    return Subject(model, tiny_module(kind), tokenizer, prompts(16), 16, pages=256)


@functools.cache
def small() -> Subject:
    model = smollm2()
    reference: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        model.folder, dtype=torch.float32
    )
    reference.eval()  # type: ignore[no-untyped-call]
    tokenizer = Tokenizer.load(model.folder)
    ids = tokenizer.encode(TEXT)
    asked = [ids[n : 33 + 2 * n] for n in range(16)]
    return Subject(model, reference, tokenizer, asked, 4, pages=96)


class Cluster:
    """Pool nodes, and engines that share them."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.sockets = Path(tempfile.mkdtemp(prefix="pie"))
        self._nodes = 0
        self._closers: list[Callable[[], Awaitable[None]]] = []

    async def pool(self) -> PoolClient:
        """Start a node and return a client of it."""
        self._nodes += 1
        name = f"pool-{self._nodes}"
        node = PoolNode(
            PlaceId(name),
            PoolSettings.model_validate({"ram_budget": "64MiB"}),
            index_url=None,
            epoch=Epoch(1),
            address=f"ipc://{self.sockets}/{name}",
            secret=SECRET,
        )
        client = PoolClient(Places(await node.start()), PoolSettings(), secret=SECRET)
        self._closers += [node.close, client.close]
        return client

    async def engine(self, pool: PoolClient) -> Threaded:
        """Start an engine that has computed nothing."""
        subject, layout = self.subject, self.subject.model.layout
        own = device(subject.model, subject.pages, slots=64)
        arena = own.arena
        engine = Threaded(
            Runner(subject.model, arena),
            subject.tokenizer,
            pages=own.pages,
            states=own.states,
            page_tokens=subject.page_tokens,
            page_bytes=arena.page_bytes,
            root=subject.model.model_root,
            context_tokens=400,
            step_tokens=128,
        )
        names = PageNames(subject.model.model_root, layout)
        attached = engine.attach(pool, arena, names, limit_s=30.0, secret=SECRET)
        attached.choice.times = {tier: Untimed() for tier in LoadTier}
        engine.start()
        self._closers.append(engine.stop)
        return engine

    async def store(self, pool: PoolClient, asked: Sequence[list[int]]) -> None:
        """Have an engine compute prompts and store their pages."""
        maker = await self.engine(pool)
        for prompt in asked:
            await maker.ask(prompt, 1)
        made = sum(change.stored for change in maker.changes)
        await maker.until(lambda: maker.engine.status.pages_stored >= made, timeout_s=60)

    async def ask(self, engine: Threaded, prompt: list[int]) -> Answer:
        answer = engine.submit(prompt, self.subject.answer_tokens)
        await self.ended(engine, [answer])
        return answer

    async def ended(self, engine: Threaded, answers: Sequence[Answer]) -> None:
        await engine.until(lambda: all(one.finish_reason for one in answers), timeout_s=120)

    async def pages(self, pool: PoolClient, prompt: list[int]) -> list[StoredPage]:
        """Load all parts of all full pages of a prompt, and what snapshots there are."""
        keys = page_keys(self.subject.model.model_root, prompt, self.subject.page_tokens)
        parts = self.subject.model.layout.parts
        loaded = await pool.load(
            [PageId(key, part) for key in keys for part in parts],
            groups=[group for group in group_keys(keys) for _ in parts],
            deadline_s=30,
        )
        pages = [page for page in loaded if page is not None]
        attention = [page for page in pages if page.header.part is not Part.STATE]
        assert len(attention) == len(keys) * len(self.subject.model.layout.attention_parts)
        return pages

    async def close(self) -> None:
        for close in reversed(self._closers):
            await close()
        shutil.rmtree(self.sockets)


TINY = ("llama", "qwen3", "gemma3", "gpt2", *RECURRENT)
# What takes a large model long is tried with the tiny ones of every kind, and with it in the soak.
SOAKED = pytest.param("smollm2", marks=[pytest.mark.timeout(900), pytest.mark.soak])


@pytest.fixture(
    params=[
        *TINY,
        pytest.param(
            "smollm2", marks=[pytest.mark.timeout(900), pytest.mark.xdist_group("smollm2")]
        ),
    ]
)
def subject(request: pytest.FixtureRequest, tokenizer: Tokenizer) -> Subject:
    return small() if request.param == "smollm2" else tiny(request.param, tokenizer)


@pytest.fixture
async def cluster(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    # A busy machine must not turn a load into a miss.
    monkeypatch.setattr(offload, "_LEAST_LOAD_S", 30.0)
    cluster = Cluster(subject)
    yield cluster
    await cluster.close()


def long_prompts(subject: Subject) -> tuple[list[int], list[int]]:
    """Return two prompts that differ throughout and have three full pages or more."""
    longest = max(subject.prompts, key=len)
    return longest, longest[::-1]


async def test_alone(cluster: Cluster, subject: Subject) -> None:
    prompt, _ = long_prompts(subject)
    pool = await cluster.pool()
    await cluster.store(pool, [prompt])
    fed = await cluster.ask(await cluster.engine(pool), prompt)
    assert (fed.cached.device, fed.cached.pool) == (0, subject.full(prompt))
    expect(subject.reference, prompt, fed)


@pytest.mark.parametrize("subject", [*TINY, SOAKED], indirect=True)
async def test_in_a_mixed_batch_of_sixteen(cluster: Cluster, subject: Subject) -> None:
    pool = await cluster.pool()
    cold = subject.prompts[::5]
    await cluster.store(pool, [prompt for prompt in subject.prompts if prompt not in cold])
    engine = await cluster.engine(pool)
    answers = [engine.submit(prompt, subject.answer_tokens) for prompt in subject.prompts]
    await cluster.ended(engine, answers)
    assert len(answers) == 16
    assert sum(answer.cached.pool > 0 for answer in answers) >= 4
    for prompt, answer in zip(subject.prompts, answers, strict=True):
        # A single page more than others have is computed rather than fetched.
        if prompt not in cold and len(prompt) >= 2 * subject.page_tokens:
            assert answer.cached.total >= subject.full(prompt) - subject.page_tokens
        expect(subject.reference, prompt, answer)


async def test_a_page_that_is_exchanged_on_the_way_shows(
    cluster: Cluster, subject: Subject
) -> None:
    prompt, other = long_prompts(subject)
    honest = await cluster.pool()
    await cluster.store(honest, [prompt, other])
    stored, foreign = await cluster.pages(honest, prompt), await cluster.pages(honest, other)
    # The last but one, which the windows of sliding layers still see; or the snapshot that is used.
    swapped = (len(prompt) // subject.page_tokens - 2, subject.model.layout.parts[0])
    if subject.model.states:
        swapped = (subject.full(prompt) // subject.page_tokens - 1, Part.STATE)
    headers: list[PageHeader] = []
    payloads: list[bytes] = []
    for page, wrong in zip(stored, foreign, strict=True):
        assert (page.header.index, page.header.part) == (wrong.header.index, wrong.header.part)
        is_wrong = (page.header.index, page.header.part) == swapped
        payload = bytes((wrong if is_wrong else page).payload)
        checksum = Checksum(SECRET).digest(payload)
        headers.append(msgspec.structs.replace(page.header, checksum=checksum))
        payloads.append(payload)
    keys = page_keys(subject.model.model_root, prompt, subject.page_tokens)
    groups = [group_keys(keys)[header.index] for header in headers]
    lying = await cluster.pool()
    became = await lying.store(headers, payloads, groups=groups, deadline_s=30)
    assert set(became) == {PutStatus.STORED}
    fed = await cluster.ask(await cluster.engine(lying), prompt)
    assert fed.cached.pool == subject.full(prompt)
    with pytest.raises(AssertionError, match="differs"):
        expect(subject.reference, prompt, fed)
