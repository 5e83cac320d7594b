"""Answers match their grammar from the first token to the last, also where another worker goes on."""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from pie.router.api.tools import Tool
from pie.router.reading import AnswerReader, CallArguments, CallBegun, Content
from pie.router.tool_formats import FORMATS, MISTRAL, ToolFormat, calling_grammar
from pie.tokens.tokenizer import Tokenizer
from pie.wire.errors import RefusedError
from pie.wire.messages import FinishReason, Generate, Grammar, GrammarKind, RefusalCode, Sampling
from pie.worker.commands import Submit
from pie.worker.grammar import GrammarCompiler, GrammarFailedError
from tests.support.chat_folder import write_chat_folder
from tests.worker.engine import toys
from tests.worker.engine.driver import EOS, EPOCH, ROUTER, Answer, Driver
from tests.worker.engine.toys import VOCAB, ToyRunner

PAGE = 4
PROMPT = list(range(3, 25))
SCHEMA = Grammar(
    GrammarKind.JSON_SCHEMA,
    json.dumps(
        {
            "type": "object",
            "properties": {
                "city": {"enum": ["Paris", "Oslo"]},
                "size": {"type": "integer", "minimum": 10, "maximum": 99},
            },
            "required": ["city", "size"],
            "additionalProperties": False,
        }
    ),
)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Iterator[GrammarCompiler]:
    with closing(GrammarCompiler(tokenizer, vocab_size=VOCAB, eos_token_ids=(EOS,))) as compiler:
        yield compiler


@pytest.fixture(scope="module")
def larger(tokenizer: Tokenizer) -> Iterator[GrammarCompiler]:
    """Returns one whose model has more tokens."""
    with closing(GrammarCompiler(tokenizer, vocab_size=256, eos_token_ids=(EOS,))) as compiler:
        yield compiler


@pytest.fixture
def driver(tokenizer: Tokenizer) -> Driver:
    return Driver(ToyRunner(256, PAGE), tokenizer, pages=256, page_tokens=PAGE)


def ask(
    driver: Driver,
    compiler: GrammarCompiler,
    grammar: Grammar,
    *,
    output: tuple[int, ...] = (),
    **fields: Any,
) -> Answer:
    given: dict[str, Any] = {"max_tokens": 200, "sampling": Sampling(temperature=3.0, seed=4)}
    request = Generate(
        f"g{len(driver.answers)}", EPOCH, len(PROMPT), grammar=grammar, **(given | fields)
    )
    answer = driver.answers[request.request_id] = Answer()
    tokens = array("I", [*PROMPT, *output])
    driver.put(Submit(ROUTER, request, tokens, compiler.compile(grammar)))
    driver.run()
    return answer


@pytest.mark.parametrize("seed", range(5))
def test_an_answer_is_json_of_its_schema(
    driver: Driver, compiler: GrammarCompiler, seed: int
) -> None:
    answer = ask(driver, compiler, SCHEMA, sampling=Sampling(temperature=5.0, seed=seed))
    assert answer.finish_reason is FinishReason.STOP
    found = json.loads(answer.text)
    assert set(found) == {"city", "size"}
    assert found["city"] in ("Paris", "Oslo")
    assert 10 <= found["size"] <= 99


def test_without_the_grammar_it_is_not(driver: Driver) -> None:
    answer = driver.generate(PROMPT, 60, sampling=Sampling(temperature=5.0, seed=1))
    with pytest.raises(json.JSONDecodeError):
        json.loads(answer.text)


@pytest.mark.parametrize(
    ("grammar", "matches"),
    [
        (Grammar(GrammarKind.REGEX, r"[a-c]{4}/[0-9]+x"), r"[a-c]{4}/[0-9]+x"),
        (Grammar(GrammarKind.CHOICE, '["yes", "no", "\\"é\\""]'), 'yes|no|"é"'),
        (Grammar(GrammarKind.LARK, 'start: "<" WORD ">"\nWORD: /[a-z]{1,5}/'), "<[a-z]{1,5}>"),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 4.0])
def test_other_grammars_hold_too(
    driver: Driver, compiler: GrammarCompiler, grammar: Grammar, matches: str, temperature: float
) -> None:
    answer = ask(driver, compiler, grammar, sampling=Sampling(temperature=temperature, seed=2))
    assert re.fullmatch(matches, answer.text)


@pytest.mark.parametrize("cut", [1, 5, 12])
def test_another_worker_goes_on_in_the_middle(
    driver: Driver, compiler: GrammarCompiler, tokenizer: Tokenizer, cut: int
) -> None:
    whole = ask(driver, compiler, SCHEMA)
    other = Driver(ToyRunner(256, PAGE), tokenizer, pages=256, page_tokens=PAGE)
    rest = ask(other, compiler, SCHEMA, output=tuple(whole.token_ids[:cut]))
    assert [*whole.token_ids[:cut], *rest.token_ids] == whole.token_ids
    assert whole.text.endswith(rest.text)


def test_choices_have_states_of_their_own(driver: Driver, compiler: GrammarCompiler) -> None:
    grammar = Grammar(GrammarKind.REGEX, "a[b-y]{9}z")
    texts = {
        ask(driver, compiler, grammar, sampling=Sampling(temperature=3.0, seed=seed)).text
        for seed in range(4)
    }
    assert len(texts) > 1
    assert all(re.fullmatch("a[b-y]{9}z", text) for text in texts)


def test_it_ends_when_the_grammar_does_whatever_else_is_asked(
    driver: Driver, compiler: GrammarCompiler
) -> None:
    answer = ask(
        driver,
        compiler,
        Grammar(GrammarKind.REGEX, "ab"),
        sampling=Sampling(temperature=0, min_tokens=50),
        ignore_eos=True,
    )
    assert (answer.text, answer.finish_reason) == ("ab", FinishReason.STOP)


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar(GrammarKind.JSON_SCHEMA, '{"type": "nonsense"}'),
        Grammar(GrammarKind.JSON_SCHEMA, "{"),
        Grammar(GrammarKind.REGEX, "(abc"),
        Grammar(GrammarKind.LARK, "start: nowhere"),
        Grammar(GrammarKind.LARK, "start: <no_such_token>"),
        Grammar(GrammarKind.REGEX, "a" * 600_000),
        Grammar(GrammarKind.REGEX, r"[^\s\S]"),
        Grammar(GrammarKind.REGEX, ""),
        Grammar(GrammarKind.JSON_SCHEMA, '{"$ref": "#"}'),
        Grammar(GrammarKind.CHOICE, "[]"),
        Grammar(GrammarKind.CHOICE, "3"),
        Grammar(GrammarKind.CHOICE, "[1]"),
        Grammar(GrammarKind.LARK, "start: "),
        Grammar(GrammarKind.LARK, "start: start"),
    ],
)
def test_what_is_no_grammar_is_refused_in_one_line(
    compiler: GrammarCompiler, grammar: Grammar
) -> None:
    with pytest.raises(RefusedError) as caught:
        compiler.compile(grammar)
    refusal = caught.value.refusal("r")
    assert refusal.code is RefusalCode.BAD_GRAMMAR
    assert "\n" not in refusal.message
    assert "<state>" not in refusal.message
    assert len(refusal.message) < 400


def test_tokens_that_do_not_fit_are_an_error(compiler: GrammarCompiler) -> None:
    constraint = compiler.compile(Grammar(GrammarKind.REGEX, "abc"))
    with pytest.raises(GrammarFailedError) as failed:
        constraint.take([50, 50])
    # Not a word of what was generated: this reaches logs.
    assert str(failed.value) == "the answer has left its grammar"


def test_an_answer_that_left_its_grammar_fails_and_others_go_on(
    driver: Driver, compiler: GrammarCompiler
) -> None:
    # What came before does not fit: a router would have to be wrong.
    bad = ask(driver, compiler, SCHEMA, output=(9, 9))
    assert bad.refused is not None
    assert ask(driver, compiler, SCHEMA).finish_reason is FinishReason.STOP


TOOLS = [
    Tool.model_validate({"type": "function", "function": {"name": name, "parameters": schema}})
    for name, schema in (
        (
            "weather",
            {
                "type": "object",
                "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"enum": [1, 2, 3]}},
                "required": ["city", "days"],
                "additionalProperties": False,
                "$defs": {"city": {"enum": ["Oslo", "Bergen"]}},
            },
        ),
        ("clock", {"type": "object", "properties": {}, "additionalProperties": False}),
    )
]


@pytest.mark.parametrize("format_", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_an_answer_that_must_call_is_read_as_a_call(
    tokenizer: Tokenizer,
    larger: GrammarCompiler,
    monkeypatch: pytest.MonkeyPatch,
    format_: ToolFormat,
    several: bool,
    seed: int,
) -> None:
    monkeypatch.setattr(toys, "VOCAB", 256)
    driver = Driver(ToyRunner(256, PAGE), tokenizer, pages=256, page_tokens=PAGE)
    grammar = calling_grammar(format_, TOOLS, several=several, begin_id=None)
    answer = ask(
        driver,
        larger,
        grammar,
        max_tokens=700,
        sampling=Sampling(temperature=4.0, seed=seed),
    )
    reader = AnswerReader(format_)
    parts = [*reader.push(answer.text), *reader.end()]
    names = [part.name for part in parts if isinstance(part, CallBegun)]
    assert names
    assert several or len(names) == 1
    assert set(names) <= {"weather", "clock"}
    assert not any(isinstance(part, Content) for part in parts)
    for index, name in enumerate(names):
        found = json.loads(
            "".join(
                part.text
                for part in parts
                if isinstance(part, CallArguments) and part.index == index
            )
            or "{}"
        )
        if name == "weather" and index < len(names) - 1:
            assert found["city"] in ("Oslo", "Bergen")


def test_a_grammar_that_the_model_cannot_spell_fails_alone(
    driver: Driver, compiler: GrammarCompiler
) -> None:
    # The toy model has no token for a blank.
    other = driver.submit(PROMPT, 30)
    bad = ask(driver, compiler, Grammar(GrammarKind.REGEX, "ab c"))
    assert bad.finish_reason is FinishReason.FAILED
    assert other.finish_reason is not FinishReason.FAILED
    with pytest.raises(RefusedError, match="no token to begin"):
        compiler.compile(Grammar(GrammarKind.REGEX, " a"))


def test_a_call_may_begin_with_a_special_token(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_chat_folder(tmp_path / "chat"))
    special = tokenizer.token_id("<|im_start|>")
    assert special is not None
    compiler = GrammarCompiler(
        tokenizer, vocab_size=tokenizer.vocab_size, eos_token_ids=tokenizer.eos_token_ids
    )
    with closing(compiler):
        grammar = calling_grammar(MISTRAL, TOOLS, several=True, begin_id=special)
        constraint = compiler.compile(grammar)
    allowed = constraint.allowed()
    assert allowed is not None
    assert allowed.nonzero().flatten().tolist() == [special]
