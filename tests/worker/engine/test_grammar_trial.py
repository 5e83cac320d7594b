"""A grammar ends nobody: it is tried in a process that may die of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import psutil
import pytest

from pie.tokens.tokenizer import Tokenizer
from pie.wire.errors import RefusedError
from pie.wire.messages import Grammar, GrammarKind, RefusalCode
from pie.worker import grammar as grammar_module
from pie.worker.grammar import GrammarCompiler
from pie.worker.grammar_process import Setup
from pie.worker.grammar_trial import GrammarTrial
from tests.worker.engine.driver import EOS
from tests.worker.engine.toys import VOCAB

WORD = Grammar(GrammarKind.REGEX, "[a-z]{3}")


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Iterator[GrammarCompiler]:
    with closing(GrammarCompiler(tokenizer, vocab_size=VOCAB, eos_token_ids=(EOS,))) as compiler:
        yield compiler


@pytest.fixture
def setup(tokenizer: Tokenizer) -> Setup:
    return Setup(tokenizer.as_json(), tokenizer.vocab_size, (EOS,))


def chained(rules: int) -> Grammar:
    lines = [f"a{rule}: a{rule + 1}" for rule in range(rules)]
    return Grammar(GrammarKind.LARK, "\n".join(["start: a0", *lines, f'a{rules}: "x"']))


def referring(definitions: int) -> Grammar:
    chain = {f"a{one}": {"$ref": f"#/$defs/a{one + 1}"} for one in range(definitions)}
    last = {f"a{definitions}": {"enum": ["x"]}}
    schema = {"$ref": "#/$defs/a0", "$defs": chain | last}
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))


@pytest.mark.parametrize("grammar", [chained(3000), referring(3000)], ids=["lark", "schema"])
def test_a_long_chain_compiles_on_a_deep_stack(compiler: GrammarCompiler, grammar: Grammar) -> None:
    # On a thread's usual stack of 8 MiB it ends the process.
    assert compiler.compile(grammar).allowed() is not None


def test_one_that_ends_the_process_that_compiles_it_is_refused(compiler: GrammarCompiler) -> None:
    with pytest.raises(RefusedError, match="too deeply") as caught:
        compiler.compile(chained(36_000))
    assert caught.value.code is RefusalCode.BAD_GRAMMAR
    with pytest.raises(RefusedError, match="too deeply"):
        compiler.ready(chained(36_000))
    assert compiler.compile(WORD).allowed() is not None


def test_one_that_takes_too_long_is_refused(setup: Setup) -> None:
    limited = Setup(setup.tokenizer, setup.vocab_size, setup.eos_token_ids, limit_s=0.0)
    with closing(GrammarTrial(limited)) as trial:
        verdict = trial.verdict(chained(3000))
    assert "more than 0 s" in verdict.reason
    assert not verdict.is_final


def test_the_process_that_tries_grammars_is_started_again(setup: Setup) -> None:
    before = set(psutil.Process().children())
    with closing(GrammarTrial(setup)) as trial:
        assert not trial.verdict(WORD).reason
        (process,) = set(psutil.Process().children()) - before
        process.kill()
        assert not trial.verdict(WORD).reason
    assert set(psutil.Process().children()) <= before
    with pytest.raises(OSError, match="no more"):
        trial.verdict(WORD)


def test_grammars_in_use_are_bounded_and_room_comes_back(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_module, "_MOST_TEXT_COMPILED", 2000)
    long = [Grammar(GrammarKind.CHOICE, json.dumps([letter * 1500])) for letter in "abc"]
    held = compiler.compile(long[0])
    with pytest.raises(RefusedError, match="in use") as caught:
        compiler.compile(long[1])
    assert caught.value.code is RefusalCode.OVERLOADED
    del held
    assert compiler.compile(long[1]).allowed() is not None


def test_what_is_compiled_waits_for_no_other(compiler: GrammarCompiler) -> None:
    compiler.compile(WORD)
    with ThreadPoolExecutor(1) as pool, compiler._compiling:
        assert pool.submit(compiler.ready, WORD).result(60) is not None
