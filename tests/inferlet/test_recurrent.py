"""Programs on recurrent and hybrid models, through real processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from pydantic import ByteSize

from pie.tokens.tokenizer import Tokenizer
from pie.worker.programs.local import LocalEngine
from pie.worker.settings import ModelSettings
from tests.inferlet.conftest import LIMITS
from tests.inferlet.running import run, until_idle
from tests.inferlet.test_context import greedy, rendered
from tests.support.program_folder import reference_of, write_program_folder

pytestmark = pytest.mark.asyncio(loop_scope="session")

SOURCE = """
    import asyncio, json
    from pie.inferlet import Context, ForwardPass, RecurrentError, greedy

    async def main(ctx: Context):
        ctx.system("Be brief.").user("Who keeps the lamp?")
        ctx.user("And who keeps the keeper, when the night is long and the fog comes in?")
        likely = await ctx.score("Nobody.")
        forks = await ctx.fork(3)
        await ctx.working_set.seal()
        texts = await asyncio.gather(*(fork.generate(greedy(), max_tokens=10) for fork in forks))
        await ctx.park()
        mine = ctx.generate(greedy(), max_tokens=10)
        assert [await mine] * 3 == texts
        refused = []
        for call in (
            lambda: ctx.working_set.drop([1, 2]),
            lambda: ctx.pipeline().run(ForwardPass(ctx.working_set).input([5]).mask([0])),
        ):
            try:
                await call()
            except RecurrentError as error:
                refused.append(str(error))
        again = ctx.new_context()
        again.system("Be brief.").user("Who keeps the lamp?")
        again.user("And who keeps the keeper, when the night is long and the fog comes in?")
        await again.generate(greedy(), max_tokens=1)
        return json.dumps([likely, mine.tokens, refused, again.working_set.cached_tokens()])
    """


@pytest.mark.parametrize("kind", ["mamba2", "falcon_h1"])
async def test_the_whole_api(kind: str, tmp_path: Path) -> None:
    folder = write_program_folder(tmp_path / "model", kind)
    settings = ModelSettings(
        source=str(folder),
        dtype="float32",
        device_kv_budget=ByteSize(16 << 20),
        attention="torch",
        cache_folder=tmp_path / "cache",
        threads=1,
    )
    before = torch.get_num_threads()
    local = LocalEngine(settings, LIMITS)
    await local.start()
    try:
        ran = await run(local, SOURCE)
        likely, tokens, refused, cached = json.loads(ran.result)
        await until_idle(local)
    finally:
        await local.close()
        torch.set_num_threads(before)
    local.engine.check()
    reference = reference_of(folder)
    prompt = rendered(
        folder,
        ("system", "Be brief."),
        ("user", "Who keeps the lamp?"),
        ("user", "And who keeps the keeper, when the night is long and the fog comes in?"),
    )
    assert tokens == greedy(reference, prompt, 10)
    said = Tokenizer.load(folder).encode("Nobody.")
    with torch.inference_mode():
        logits = reference(torch.tensor([[*prompt, *said]]), use_cache=False).logits[0]
    rows = logits.log_softmax(-1)
    want = sum(float(rows[len(prompt) - 1 + at, token]) for at, token in enumerate(said))
    assert likely == pytest.approx(want, rel=1e-3)
    assert len(refused) == 2
    assert all("recurrent layers, which have no slots" in one for one in refused)
    assert cached == (len(prompt) - 1) // 16 * 16
