"""A worker's parts, put together from a folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pie.page.events import Epoch, PlaceId
from pie.policies.policy_set import PolicySet
from pie.tokens.tokenizer import Tokenizer
from pie.worker.assembly import Assembly, assemble, make_engine, make_record
from tests.worker.engine.places import model_folder, worker_settings

TURN_END = 65


@pytest.fixture
def assembly(tmp_path: Path, tokenizer_folder: Path) -> Assembly:
    """A model whose generation configuration names token 2 and whose tokenizer names another."""
    folder = model_folder(tmp_path, tokenizer_folder)
    token = Tokenizer.load(folder).token(TURN_END)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": token}))
    return assemble(worker_settings(folder), lambda _: None)


def test_an_answer_ends_where_the_tokenizer_says_too(assembly: Assembly) -> None:
    settings = worker_settings(assembly.model.folder)
    engine = make_engine(assembly, settings, PolicySet().new_retention, lambda _: None, debug=True)
    assert engine._vocabulary.eos_token_ids == {2, TURN_END}
    record = make_record(assembly, place=PlaceId("w0"), epoch=Epoch(1), address="", ttl_s=1)
    assert record.eos_token_ids == (2, TURN_END)
