from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import pytest

from pie.tokens.errors import TemplateError, TemplateLimitError
from pie.tokens.limits import TemplateLimits, limited
from pie.tokens.template import ChatTemplate
from tests.tokens import hostile, ordinary
from tests.tokens.conftest import Pair

MIB = 1024 * 1024
CPU_S = 30.0
"""Of processor time: ten times what it takes on a slow machine. What is not bounded takes for ever."""
PEAK_MIB = 320


def theirs(pairs: Callable[[str], Pair], source: str) -> str:
    """What transformers makes of a template."""
    return str(
        pairs("byte_level").theirs.apply_chat_template(
            [ordinary.MESSAGE], chat_template=source, tokenize=False
        )
    )


def ours(source: str, limits: TemplateLimits | None = None) -> str:
    template = ChatTemplate({"default": source}, {}, limits=limits)
    return template.render([ordinary.MESSAGE], add_generation_prompt=False)


@pytest.mark.parametrize("body", ordinary.EXPRESSIONS)
def test_an_ordinary_expression_gives_what_transformers_gives(
    pairs: Callable[[str], Pair], body: str
) -> None:
    source = "{% set m = messages[0] %}" + body
    assert ours(source) == theirs(pairs, source)


VALUES = st.sampled_from(
    # Not literals: jinja2 works those out as it compiles, and a few differently.
    [
        "m.content",
        "m.parts",
        "m.numbers",
        "m.map",
        "m.role",
        "m.numbers[0]",
        "nothing",
        "m.map.a[0]",
    ]
)
PIPES = st.sampled_from(
    [
        "trim",
        "upper",
        "lower",
        "title",
        "length",
        "list",
        "string",
        "tojson",
        "first",
        "last",
        "sort",
        "unique|list",
        "reverse|list",
        "join",
        "join(',')",
        "sum",
        "int",
        "float",
        "abs",
        "round(1)",
        "e",
        "safe",
        "replace('a','bb')",
        "default('x')",
        "center(9)",
        "indent(2)",
        "wordcount",
        "batch(2)|list",
        "slice(2)|list",
        "map('string')|list",
        "dictsort",
        "items|list",
        "map(attribute='n')|list",
        "selectattr('n')|list",
        "select('number')|list",
        "max",
        "min",
        "truncate(4)",
        "format(1)",
        "tojson(indent=1)",
        "tojson(ensure_ascii=true)",
        "urlencode",
        "striptags",
        "capitalize",
    ]
)
SUFFIXES = st.sampled_from(
    """
[0]
[1:]
[::-1]
 ~ 1
 + 'x'
 * 2
 % 2
 % 'y'
 == 'x'
.upper()
 in m.map
.split(',')
.strip('u')
.items()
.get('a')
 is string
 - 1
""".splitlines()
)


@hypothesis.settings(
    max_examples=400,
    deadline=None,
    suppress_health_check=[
        hypothesis.HealthCheck.function_scoped_fixture,
        hypothesis.HealthCheck.too_slow,
    ],
)
@hypothesis.given(value=VALUES, pipes=st.lists(PIPES, max_size=3), suffix=SUFFIXES)
def test_any_small_expression_gives_what_transformers_gives(
    pairs: Callable[[str], Pair], value: str, pipes: list[str], suffix: str
) -> None:
    expression = "|".join([value, *pipes])
    source = f"{{% set m = messages[0] %}}{{{{ ({expression}){suffix} }}}}"
    try:
        wanted = theirs(pairs, source)
    # Python's own errors, whichever they are.
    except Exception:  # noqa: BLE001
        with pytest.raises(TemplateError):
            ours(source)
        return
    if " at 0x" not in wanted:
        assert ours(source) == wanted


def memory(name: str) -> int:
    """A line of this process's memory, in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) // 1024
    raise LookupError(name)


@pytest.mark.parametrize("name", hostile.TEMPLATES)
def test_a_hostile_template_ends_soon_and_small_with_a_sentence(name: str) -> None:
    template = ChatTemplate({"default": hostile.TEMPLATES[name]}, {})
    # The highest mark of memory starts anew.
    Path("/proc/self/clear_refs").write_text("5")
    before, started_s = memory("VmRSS"), time.thread_time()
    with pytest.raises(TemplateError) as caught:
        template.render([{"role": "user", "content": "hi"}])
    assert time.thread_time() - started_s < CPU_S
    assert memory("VmHWM") - before < PEAK_MIB
    check_sentence(str(caught.value))


@pytest.mark.parametrize("name", hostile.BROKEN)
def test_a_template_that_cannot_compile_is_refused_with_a_sentence(name: str) -> None:
    started_s = time.thread_time()
    with pytest.raises(TemplateError) as caught:
        ChatTemplate({"default": hostile.BROKEN[name]}, {})
    assert time.thread_time() - started_s < CPU_S
    check_sentence(str(caught.value))


def check_sentence(text: str) -> None:
    """It can be told to whoever asked."""
    assert text.endswith(".")
    assert text.startswith("The chat template ")
    assert text.isprintable()
    assert len(text) < 400
    assert "_pie" not in text
    assert "pie_" not in text


SIZES = st.sampled_from(["60000000", "99999", "x|length", "-1", "10 ** 9"])
GROWERS = st.sampled_from(
    """
{0} * {1}
{0}.ljust({1})
{0}|center({1})
{0} ~ {0}
{0}.replace('x', {0})
({0}, {0})|join({0})
[{0}] * {1}
{0}|list
{0}|string
{0}|tojson(indent={1})
'%*s' % ({1}, {0})
'{{:{{}}}}'.format({0}, {1})
{0}.split('')
{0}.split('x')
{0}|map('center', {1})|list
{0}|batch({1}, {0})|list
{0} + {0}
({0}, {0})
{0}|slice({1})|list
{0}.encode('utf-32')
{0}|e
{0}|urlencode
{0}|sort
{0}|indent({1})
{0}|wordwrap({1})
dict(a={0})
{0}|round({1}, 'ceil')
{0} ** {1}
{0} == {0}
{0}|unique|list
[{0}]|sum(start=[{0}])
{0}|pprint
{0}[::-1]
""".strip().splitlines()
)


@hypothesis.settings(max_examples=60)
@hypothesis.given(st.lists(st.tuples(GROWERS, SIZES), min_size=1, max_size=6))
def test_whatever_grows_stays_within_the_limits(steps: list[tuple[str, str]]) -> None:
    sets = "".join(f"{{% set x = {grower.format('x', size)} %}}" for grower, size in steps)
    source = f"{{% set x = 'x' * 1000 %}}{sets}{{{{ x }}}}"
    Path("/proc/self/clear_refs").write_text("5")
    before, started_s = memory("VmRSS"), time.thread_time()
    limits = TemplateLimits()
    try:
        text = ours(source, limits)
    except TemplateError:
        text = ""
    assert time.thread_time() - started_s < CPU_S
    assert memory("VmHWM") - before < PEAK_MIB
    assert len(text) <= limits.output_chars


# --- the limits themselves -------------------------------------------------------------------------


def test_memory_that_a_template_lets_go_of_does_not_count() -> None:
    source = "{% for i in range(500) %}{% set y = ('x' * 1000000) ~ i %}{% endfor %}done"
    assert ours(source) == "done"


def test_a_value_seen_twice_counts_once() -> None:
    with limited(TemplateLimits(held_bytes=MIB)) as run:
        kept = "x" * (MIB // 2)
        for _ in range(100):
            run.note(kept)
            run.note("y" * 100_000 + str(len(kept)))


def test_values_held_by_others_count() -> None:
    with limited(TemplateLimits(held_bytes=MIB)) as run:
        held = [[run.note("y" * 100_000 + str(number))] for number in range(9)]
        with pytest.raises(TemplateLimitError, match="holds more"):
            held.extend([run.note("y" * 100_000 + str(number))] for number in range(9, 99))
    assert len(held) < 12


def test_a_busy_thread_beside_does_not_shorten_the_time() -> None:
    done = threading.Event()

    def work() -> None:
        while not done.is_set():
            math.factorial(300)

    beside = threading.Thread(target=work)
    beside.start()
    try:
        source = "{% for i in range(60000) %}{{ 'x' if i == 5 }}{% endfor %}"
        assert ours(source, TemplateLimits(cpu_s=1.0)) == "x"
    finally:
        done.set()
        beside.join()


def test_what_may_be_read_is_the_same_each_time_and_of_each_type() -> None:
    # Text has a method `index` that may be called; a number has none of what text has, and nobody a `translate`.
    seen = "{{ (value.index is defined, value.translate is defined, value.real is defined) }}"
    source = "".join(f"{{% set value = {value} %}}{seen}" for value in ("'a'", "1", "'b'", "2"))
    template = ChatTemplate({"default": source}, {})
    text, number = "(True, False, False)", "(False, False, True)"
    for _ in range(2):
        rendered = template.render([ordinary.MESSAGE], add_generation_prompt=False)
        assert rendered == text + number + text + number


def test_a_template_may_make_up_any_number_of_names() -> None:
    template = ChatTemplate(
        {
            "default": "{% for n in range(9000) %}{{ 'x'|attr('__a' ~ n) }}{% endfor %}{{ 'x'.upper() }}"
        },
        {},
    )
    for _ in range(2):
        assert template.render([ordinary.MESSAGE], add_generation_prompt=False) == "X"


def test_a_long_conversation_is_far_from_the_limits() -> None:
    """5,000 messages of a thousand characters, each cut up in the ways that templates do."""
    source = (
        "{% for m in messages %}{% set c = m.content | trim %}"
        "{% if '</think>' in c %}{% set c = c.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
        "{{ '<|start|>' + m.role + '\\n' + c ~ '<|end|>' }}{{ {'a': [c]} | tojson }}{% endfor %}"
    )
    template = ChatTemplate({"default": source}, {}, limits=TemplateLimits(cpu_s=15))
    messages = [{"role": "user", "content": f"{n} " + "</think>x\n" * 100} for n in range(5000)]
    assert template.render(messages)


def test_a_conversation_nested_too_deep_is_refused() -> None:
    nested: list[object] = []
    for _ in range(5000):
        nested = [nested]
    with pytest.raises(TemplateError, match="nested too deep"):
        ChatTemplate({"default": "x"}, {}).render([{"role": "user", "content": nested}])


def test_a_long_refusal_is_cut_and_in_one_line() -> None:
    with pytest.raises(TemplateError) as caught:
        ours("{{ raise_exception('no\n\n' * 100000) }}")
    assert str(caught.value).startswith("no no no")
    assert len(str(caught.value)) <= 1000


def test_an_error_that_quotes_much_is_cut() -> None:
    with pytest.raises(TemplateError) as caught:
        ours("{{ 'x'['" + "y" * 10000 + "'].z }}")
    check_sentence(str(caught.value))
