from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from pydantic import ByteSize
from transformers import PreTrainedModel

from pie.worker.programs.local import LocalEngine
from pie.worker.settings import ModelSettings, ProgramSettings
from tests.support.program_folder import reference_of, write_program_folder

LIMITS = ProgramSettings(wall_s=240, cpu_s=30, output=ByteSize(1 << 20))


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_program_folder(tmp_path_factory.mktemp("program") / "model")


@pytest.fixture(scope="session")
def reference(model_folder: Path) -> PreTrainedModel:
    return reference_of(model_folder)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def local(
    model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[LocalEngine]:
    settings = ModelSettings(
        source=str(model_folder),
        dtype="float32",
        device_kv_budget=ByteSize(8 << 20),
        attention="torch",
        cache_folder=tmp_path_factory.mktemp("cache"),
        threads=1,
    )
    before = torch.get_num_threads()
    engine = LocalEngine(settings, LIMITS)
    await engine.start()
    yield engine
    await engine.close()
    engine.engine.check()
    torch.set_num_threads(before)
