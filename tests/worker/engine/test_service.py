"""Workers over the wire, with a real index and a real pool node."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from transformers import PreTrainedModel

from pie.index.settings import IndexSettings
from pie.page.events import Part, PlaceId, Tier, part_bit
from pie.page.key import page_keys
from pie.tokens.tokenizer import Tokenizer
from pie.wire.figures import kinds, report
from pie.wire.messages import (
    AskStatus,
    FinishReason,
    Generate,
    Grammar,
    GrammarKind,
    Lookup,
    RefusalCode,
    StatusReport,
)
from pie.wire.settings import WORKER_LIMITS
from pie.worker.grammar import Constraint, GrammarCompiler
from pie.worker.service import WorkerService
from pie.worker.status import WorkerStatus
from tests.support.credit import hold_credit
from tests.support.models import CONTEXT_TOKENS, VOCAB_SIZE, tiny_module
from tests.support.redis_server import index_settings, redis_server, redis_url
from tests.worker.engine.asking import Asker
from tests.worker.engine.places import PAGE, Brake, Places, model_folder, until
from tests.worker.engine.test_models import expect, prompts

__all__ = ["index_settings", "redis_server", "redis_url"]

pytestmark = pytest.mark.live

PROMPT = list(range(10, 60))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> Path:
    return model_folder(tmp_path_factory.mktemp("models"), tokenizer_folder)


@pytest.fixture(scope="module")
def reference() -> PreTrainedModel:
    return tiny_module("llama")


@pytest.fixture
async def places(index_settings: IndexSettings, folder: Path) -> AsyncIterator[Places]:
    places = Places(index_settings, folder)
    await places.start()
    yield places
    await places.close()


@pytest.fixture
async def worker(places: Places) -> WorkerService:
    return await places.worker("w0", pool=False)


@pytest.fixture
async def asker(places: Places, worker: WorkerService) -> Asker:
    return await places.asker(worker)


async def test_says_what_it_is(worker: WorkerService, places: Places, folder: Path) -> None:
    record = worker.record
    assert places.mirror.places()[PlaceId("w0")] == record
    assert (record.vocab_size, record.context_tokens) == (VOCAB_SIZE, CONTEXT_TOKENS)
    assert (record.page_tokens, record.dtype) == (PAGE, "float32")
    assert record.eos_token_ids == (2,)
    assert record.tokenizer_digest == Tokenizer.load(Path(record.tokenizer_path)).digest
    assert worker.status().state == "serving"


async def test_answers_as_transformers_would(asker: Asker, reference: PreTrainedModel) -> None:
    asked = [(prompt, (await asker.send(prompt, 20))[1]) for prompt in prompts(8)]
    for prompt, answer in asked:
        await asker.ended(answer)
        expect(reference, prompt, answer)


async def test_tells_the_index_what_it_holds(
    asker: Asker, worker: WorkerService, places: Places
) -> None:
    await asker.ask(PROMPT, 2)
    root = worker.record.model_root
    assert root is not None
    keys = page_keys(root, PROMPT, PAGE)
    both = part_bit(Part.FULL, Tier.DEVICE) | part_bit(Part.FULL, Tier.HOST)

    def is_known() -> bool:
        return list(places.mirror.matches(keys).get(PlaceId("w0"), ())) == [both] * len(keys)

    await until(is_known)


async def test_a_second_worker_goes_on_from_the_pool(
    places: Places, reference: PreTrainedModel
) -> None:
    await places.pool()
    first, second = await places.worker("w0"), await places.worker("w1")
    one, two = await places.asker(first), await places.asker(second)
    made = await one.ask(PROMPT, 16)
    await until(lambda: first.status().pages_stored >= len(PROMPT) // PAGE)
    fed = await two.ask(PROMPT, 16)
    expect(reference, PROMPT, fed)
    assert fed.token_ids == made.token_ids
    assert fed.cached.pool == len(PROMPT) // PAGE * PAGE
    assert second.status().cached_tokens_pool == fed.cached.pool
    warm = await two.ask(PROMPT, 16)
    assert warm.token_ids == made.token_ids
    assert warm.cached.device == fed.cached.pool


async def test_pages_of_a_cluster_with_a_secret_are_of_use_to_nobody_else(
    places: Places, reference: PreTrainedModel
) -> None:
    places.secret = b"s" * 32
    node = await places.pool()
    first, second = await places.worker("w0"), await places.worker("w1")
    places.secret = None
    stranger = await places.worker("w2")
    one, two = await places.asker(first), await places.asker(second)
    await one.ask(PROMPT, 4)
    await until(lambda: first.status().pages_stored >= len(PROMPT) // PAGE)
    assert (await two.ask(PROMPT, 4)).cached.pool == len(PROMPT) // PAGE * PAGE
    # Without the secret nothing is taken for a page, neither here nor there.
    other = await places.asker(stranger)
    answer = await other.ask(PROMPT, 16)
    assert answer.cached.pool == 0
    expect(reference, PROMPT, answer)
    await other.ask(PROMPT[::-1], 4)
    await until(lambda: node.status().bad_pages["at_store"] > 0)


async def test_a_pool_node_that_went_is_a_miss(places: Places, reference: PreTrainedModel) -> None:
    node = await places.pool()
    first, second = await places.worker("w0"), await places.worker("w1")
    one, two = await places.asker(first), await places.asker(second)
    await one.ask(PROMPT, 4)
    await until(lambda: first.status().pages_stored >= len(PROMPT) // PAGE)
    await node.close()
    answer = await two.ask(PROMPT, 16)
    expect(reference, PROMPT, answer)
    assert answer.cached.pool == 0


async def test_a_cancelled_request_frees_its_pages_at_once(
    asker: Asker, worker: WorkerService
) -> None:
    Brake(worker, pause_s=0.05)
    request_id, answer = await asker.send(PROMPT, 400, ignore_eos=True)
    await asker.until_told(lambda: answer.deltas > 2)
    await asker.cancel(request_id)
    await until(lambda: worker.status().cancelled == 1)
    status = worker.status()
    assert status.running == status.pages_in_use == status.pages_writable == 0
    assert (await asker.ask([5, 6], 3)).finish_reason is not None


async def test_a_request_that_is_cancelled_while_its_grammar_compiles_never_reaches_the_engine(
    asker: Asker, worker: WorkerService, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go = threading.Event(), threading.Event()
    compiled = GrammarCompiler.compile

    def slow(self: GrammarCompiler, grammar: Grammar) -> Constraint:
        begun.set()
        assert go.wait(60)
        return compiled(self, grammar)

    monkeypatch.setattr(GrammarCompiler, "compile", slow)
    for _ in range(3):
        begun.clear()
        request_id, answer = await asker.send(
            PROMPT, 4, grammar=Grammar(GrammarKind.REGEX, "[a-z]+")
        )
        assert await asyncio.to_thread(begun.wait, 60)
        # In one go: the compilation ends as the cancel comes.
        await asker.cancel(request_id)
        go.set()
        # What is asked after it is through only once it would have been.
        assert (await asker.ask([5, 6], 3)).finish_reason is not None
        assert (answer.deltas, answer.refused) == (0, None)
        assert worker.status().running == 0
        go.clear()
        monkeypatch.setattr(GrammarCompiler, "ready", lambda *_: None)
    assert worker._submitted == 3


async def test_a_router_that_goes_cancels_its_requests(
    places: Places, worker: WorkerService
) -> None:
    going, staying = await places.asker(worker), await places.asker(worker)
    brake = Brake(worker, pause_s=0.05)
    _, answer = await going.send(PROMPT, 400, ignore_eos=True)
    await going.until_told(lambda: answer.deltas > 2)
    _, other = await staying.send(PROMPT[::-1], 100, ignore_eos=True)
    await going.client.close()
    await until(lambda: worker.status().cancelled == 1)
    brake.pause_s = 0.0
    await staying.ended(other)
    assert len(other.token_ids) == 100


async def test_routers_that_come_and_go_leave_no_task(
    places: Places, worker: WorkerService
) -> None:
    before = len(asyncio.all_tasks())
    for _ in range(5):
        asker = await places.asker(worker)
        await asker.ask([5, 6], 2)
        await asker.client.close()
    await until(lambda: len(asyncio.all_tasks()) <= before)


async def test_bad_requests_are_refused_and_the_next_one_works(asker: Asker) -> None:
    too_long = await asker.ask([5] * (CONTEXT_TOKENS + 1))
    assert too_long.refused is not None
    assert too_long.refused.code is RefusalCode.CONTEXT_LENGTH
    unknown = await asker.ask([VOCAB_SIZE])
    assert unknown.refused is not None
    assert unknown.refused.code is RefusalCode.BAD_MESSAGE
    assert (await asker.ask([5, 6], 3)).finish_reason is not None


async def test_a_message_for_another_kind_of_place_is_refused(asker: Asker) -> None:
    asker.answers["x"] = (await asker.send([5], 1))[1]
    await asker.client.send(Lookup("x", asker.client.epoch, ()))
    await asker.until_told(lambda: asker.answers["x"].refused is not None)


async def test_a_frame_that_is_no_prompt_is_refused_and_a_huge_one_ends_its_connection(
    places: Places, worker: WorkerService, asker: Asker
) -> None:
    stranger = await places.asker(worker)
    stranger.answers["x"] = (await stranger.send([5], 1))[1]
    request = Generate("x", stranger.client.epoch, 1, 1)
    await stranger.client.send(request, [bytes(16 << 20)])
    await stranger.until_told(lambda: stranger.answers["x"].refused is not None)
    assert not stranger.gone.is_set()
    await stranger.client.send(request, [bytes(64 << 20)])
    await asyncio.wait_for(stranger.gone.wait(), 60)
    assert (await asker.ask([5, 6], 3)).finish_reason is not None


async def test_another_epoch_is_refused(asker: Asker) -> None:
    answer = await asker.ask([5, 6], epoch=7)
    assert answer.refused is not None
    assert answer.refused.code is RefusalCode.STALE_EPOCH


async def test_a_full_queue_refuses(places: Places) -> None:
    worker = await places.worker("w0", pool=False, max_running=1, max_waiting=1)
    asker = await places.asker(worker)
    brake = Brake(worker)
    brake.free.clear()
    answers = [(await asker.send(PROMPT, 60, ignore_eos=True))[1] for _ in range(8)]
    await until(lambda: worker._submitted + worker._refused == 8)
    brake.free.set()
    for answer in answers:
        await asker.ended(answer)
    refused = [answer.refused for answer in answers if answer.refused is not None]
    assert refused
    assert all(one.code is RefusalCode.OVERLOADED and one.retry_after_s for one in refused)
    assert len(refused) < 8


async def test_without_a_queue_an_idle_worker_answers(places: Places) -> None:
    worker = await places.worker("w0", pool=False, max_running=2, max_waiting=0)
    asker = await places.asker(worker)
    for _ in range(3):
        answers = [(await asker.send(PROMPT, 4, ignore_eos=True))[1] for _ in range(2)]
        for answer in answers:
            await asker.ended(answer)
        assert not any(answer.refused for answer in answers)


async def test_a_slow_router_gets_merged_steps(places: Places, worker: WorkerService) -> None:
    asker = await places.asker(worker)
    give = hold_credit(asker.client)
    brake = Brake(worker, pause_s=0.01)
    _, answer = await asker.send([5, 6, 7], 300, ignore_eos=True)
    await asker.until_told(lambda: len(asker.steps) == WORKER_LIMITS.credit_messages)
    brake.pause_s = 0.0
    await until(lambda: worker.status().finished == 1)
    assert answer.finish_reason is None, "there was credit for all steps"
    before = answer.deltas
    give(before)
    await asker.ended(answer)
    assert len(answer.token_ids) == 300
    assert answer.deltas < before + 3


async def test_drains(places: Places, worker: WorkerService, asker: Asker) -> None:
    _, running = await asker.send(PROMPT, 60, ignore_eos=True)
    await asker.until_told(lambda: running.deltas > 1)
    draining = asyncio.create_task(worker.drain(60))
    await until(lambda: worker.status().state == "draining")
    late = await asker.ask([5], 2)
    assert late.refused is not None
    assert late.refused.code is RefusalCode.DRAINING
    await draining
    await asker.ended(running)
    assert len(running.token_ids) == 60
    await worker.close()
    await until(lambda: PlaceId("w0") not in places.mirror.places())


async def test_drain_keeps_to_its_time(worker: WorkerService, asker: Asker) -> None:
    brake = Brake(worker)
    brake.free.clear()
    _, answer = await asker.send(PROMPT, 400, ignore_eos=True)
    await until(lambda: worker._submitted == 1)
    async with asyncio.timeout(60):
        await worker.drain(0.05)
    assert answer.finish_reason is None
    brake.free.set()


async def test_a_prefill_of_one_router_is_known_to_another_that_never_asked(
    places: Places, worker: WorkerService
) -> None:
    one, two = await places.asker(worker), await places.asker(worker)
    brake = Brake(worker)
    brake.free.clear()
    _, answer = await one.send(PROMPT, 2)
    await two.until_told(lambda: bool(two.loads) and two.loads[-1].running == 1)
    assert two.loads[-1].waiting_tokens == len(PROMPT)
    told = len(two.loads)
    # It is told while it stays the same.
    await two.until_told(lambda: len(two.loads) >= told + 2)
    brake.free.set()
    await one.ended(answer)


async def test_a_failed_start_leaves_nothing_behind(places: Places, tmp_path: Path) -> None:
    with pytest.raises(Exception, match=str(tmp_path / "nothing")):
        await places.worker("w9", source=str(tmp_path / "nothing"))
    assert places.workers[-1].status().state == "closed"


async def test_tells_what_it_counts(worker: WorkerService, asker: Asker) -> None:
    await asker.ask(PROMPT, 4)
    await until(lambda: worker.status().finished == 1)
    told, _ = await asker.client.request(AskStatus("status"), timeout_s=60)
    assert isinstance(told, StatusReport)
    assert (told.place, told.epoch, told.state) == ("w0", worker.record.epoch, "serving")
    assert told.counters["requests"] == told.counters["finished"] == 1
    assert told.counters["prefill_tokens"] == len(PROMPT)
    assert told.gauges["pages"] == worker.record.total_pages


def test_every_number_of_a_status_is_a_counter_or_a_gauge() -> None:
    assert kinds(WorkerStatus).keys() == set(WorkerStatus.__struct_fields__) - {"state"}


async def test_a_step_that_fails_ends_its_requests_with_a_reason(
    asker: Asker, worker: WorkerService
) -> None:
    assert worker._engine is not None
    runner = worker._engine._runner
    real_run = runner.run

    def fail(_: object) -> None:
        raise MemoryError("too big")

    runner.run = fail  # type: ignore[method-assign, assignment]
    failed = await asker.ask([5, 6], 3)
    runner.run = real_run  # type: ignore[method-assign]
    assert failed.finish_reason is FinishReason.FAILED
    assert failed.error is not None
    assert "too big" in failed.error
    assert (await asker.ask([5, 6], 3)).finish_reason is not FinishReason.FAILED


async def test_pages_on_disk_survive_a_restart_and_are_announced_again(
    places: Places, reference: PreTrainedModel, tmp_path: Path
) -> None:
    places.secret = b"s" * 32
    fields: dict[str, Any] = {"disk_kv_budget": "16MiB", "disk_kv_path": str(tmp_path / "kv")}
    first = await places.worker("w0", pool=False, **fields)
    made = await (await places.asker(first)).ask(PROMPT, 16)
    await first.drain(60)
    await first.close()
    second = await places.worker("w0", pool=False, address="again", **fields)
    assert second.record.tiers == (Tier.DEVICE, Tier.HOST, Tier.DISK)
    root = second.record.model_root
    assert root is not None
    keys = page_keys(root, PROMPT, PAGE)
    on_disk = part_bit(Part.FULL, Tier.DISK)

    def is_known() -> bool:
        run = places.mirror.matches(keys).get(PlaceId("w0"), ())
        return len(run) == len(keys) and all(mask & on_disk for mask in run)

    await until(is_known)
    fed = await (await places.asker(second)).ask(PROMPT, 16)
    assert fed.token_ids == made.token_ids
    # What it says of itself must be fit to travel.
    told = report("r", second.record.place, second.record.epoch, "serving", second.status())
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(told), type=StatusReport) == told
    expect(reference, PROMPT, fed)
    assert fed.cached.disk == len(PROMPT) // PAGE * PAGE
    status = second.status()
    assert status.cached_tokens_disk == fed.cached.disk
    assert status.tier_budget_bytes["disk"] == 16 << 20
    assert status.disk_folders["ok"] == 1


async def test_an_idle_conversation_comes_back_from_host_memory(
    places: Places, reference: PreTrainedModel
) -> None:
    worker = await places.worker("w0", pool=False, device_kv_budget="128KiB", context_tokens=120)
    asker = await places.asker(worker)
    await asker.ask(PROMPT, 4)
    pages = worker.status().pages
    for number in range(2 * pages * PAGE // 100 + 2):
        await asker.ask([3 + number] * 100, 4)
    answer = await asker.ask(PROMPT, 16)
    expect(reference, PROMPT, answer)
    assert answer.cached.host == len(PROMPT) // PAGE * PAGE
    assert worker.status().pages_lost == 0
