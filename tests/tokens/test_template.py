from __future__ import annotations

import datetime as dt
import enum
import json
import pickle
import threading
import time
from collections.abc import Callable
from pathlib import Path

import jinja2
import pytest
from transformers import PreTrainedTokenizerFast

from pie.tokens.errors import (
    TemplateError,
    TemplateLimitError,
    TemplateRefusedError,
    TokenizerError,
)
from pie.tokens.limits import TemplateLimits
from pie.tokens.template import ChatTemplate
from tests.tokens import chat, folders
from tests.tokens.conftest import Pair

SAID = [{"role": "user", "content": "hi"}]


def made(source: str, **limits: int) -> ChatTemplate:
    return ChatTemplate({"default": source}, {}, limits=TemplateLimits(**limits))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return folders.write("byte_level", tmp_path / "model")


# --- equal to transformers -------------------------------------------------------------------------


@pytest.mark.parametrize("template", chat.TEMPLATES)
@pytest.mark.parametrize("conversation", chat.CONVERSATIONS)
@pytest.mark.parametrize("tools", [None, chat.TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize("prompt", [True, False], ids=["prompt", "no_prompt"])
def test_a_conversation_renders_as_transformers_renders_it(
    pairs: Callable[[str], Pair],
    template: str,
    conversation: str,
    tools: list[dict[str, object]] | None,
    prompt: bool,
) -> None:
    theirs = pairs("byte_level").theirs
    source, messages = chat.TEMPLATES[template], chat.CONVERSATIONS[conversation]
    ours = ChatTemplate({"default": source}, theirs.special_tokens_map)
    refusal: Exception | None = None
    wanted = ""
    try:
        wanted = theirs.apply_chat_template(
            messages,
            chat_template=source,
            tools=tools,
            add_generation_prompt=prompt,
            tokenize=False,
        )
    except (jinja2.TemplateError, TypeError) as error:
        refusal = error
    if refusal is not None:
        with pytest.raises(TemplateError, match=r"\w\w"):
            ours.render(messages, tools=tools, add_generation_prompt=prompt)
        assert template != "recursive", refusal
        return
    assert ours.render(messages, tools=tools, add_generation_prompt=prompt) == wanted


def test_most_conversations_are_taken() -> None:
    """The test above would say little of a template that refuses everything."""
    for source in chat.TEMPLATES.values():
        template = ChatTemplate({"default": source}, {"bos_token": "<s>", "eos_token": "</s>"})
        for name in ("one", "system", "three_turns"):
            assert template.render(chat.CONVERSATIONS[name])


@pytest.mark.parametrize("thinking", [True, False])
def test_other_variables_reach_the_template(pairs: Callable[[str], Pair], thinking: bool) -> None:
    ours = made(chat.QWEN3)
    wanted = pairs("byte_level").theirs.apply_chat_template(
        [chat.USER],
        chat_template=chat.QWEN3,
        add_generation_prompt=True,
        enable_thinking=thinking,
        tokenize=False,
    )
    assert ours.render([chat.USER], enable_thinking=thinking) == wanted
    assert {"enable_thinking", "tools", "messages"} <= ours.variables


def test_a_variable_does_not_replace_the_conversation() -> None:
    template = made("{{ messages[0].content }}{{ bos_token }}")
    assert template.render(SAID, messages="x", self="y", bos_token="z") == "hiz"


def test_smollm2s_own_template_and_tokens_are_those_of_transformers(
    pairs: Callable[[str], Pair],
) -> None:
    pair = pairs("smollm2")
    ours = ChatTemplate.load(pair.folder)
    assert ours is not None
    for name in ("one", "system", "three_turns", "empty_text", "unknown_role"):
        text = ours.render(chat.CONVERSATIONS[name])
        wanted = pair.theirs.apply_chat_template(
            chat.CONVERSATIONS[name], add_generation_prompt=True, return_dict=False
        )
        assert pair.ours.encode(text) == wanted


# --- where templates are found ---------------------------------------------------------------------


def write_config(folder: Path, template: object) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))


def same_as_transformers(folder: Path, *, tools: bool = False) -> str:
    ours, theirs = ChatTemplate.load(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    assert ours is not None
    given = chat.TOOLS if tools else None
    text = ours.render(SAID, tools=given)
    assert text == theirs.apply_chat_template(
        SAID, tools=given, tokenize=False, add_generation_prompt=True
    )
    return text


def test_a_model_without_a_template_has_none(folder: Path) -> None:
    assert ChatTemplate.load(folder) is None


def test_a_template_in_the_configuration_is_found(folder: Path) -> None:
    write_config(folder, "{{ bos_token }}in the configuration")
    assert same_as_transformers(folder) == "<s>in the configuration"


def test_a_file_comes_before_the_configuration(folder: Path) -> None:
    write_config(folder, "in the configuration")
    (folder / "chat_template.jinja").write_bytes(b"in\r\nthe file{{ eos_token }}\n")
    assert same_as_transformers(folder) == "in\nthe file</s>"


def test_of_several_templates_tools_choose_the_one_for_tools(folder: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    write_config(folder, named)
    assert same_as_transformers(folder) == "plain"
    assert same_as_transformers(folder, tools=True) == "tools"


def test_templates_in_their_own_folder_are_found(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("plain")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    assert same_as_transformers(folder) == "plain"
    assert same_as_transformers(folder, tools=True) == "tools"


def test_several_templates_without_a_default_are_named(folder: Path) -> None:
    write_config(folder, {"rag": "a", "other": "b"})
    template = ChatTemplate.load(folder)
    assert template is not None
    with pytest.raises(TemplateError, match="other, rag"):
        template.render(SAID)


@pytest.mark.parametrize("value", [[{"name": "x"}], ["x"], 3])
def test_a_template_entry_of_another_shape_is_refused(folder: Path, value: object) -> None:
    write_config(folder, value)
    with pytest.raises(TokenizerError, match="chat_template"):
        ChatTemplate.load(folder)


# --- what goes wrong -------------------------------------------------------------------------------


def test_a_templates_refusal_is_given_in_its_own_words() -> None:
    with pytest.raises(TemplateRefusedError) as caught:
        made("{{ raise_exception('No system role.') }}").render(SAID)
    assert str(caught.value) == "No system role."


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("\n\n{{ messages[0].nothing.more }}", "in line 3: .*has no attribute 'nothing'"),
        ("{{ 1 + 'a' }}", "in line 1: TypeError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}\n{{ f() }}", "calls itself without end"),
        ("{{ ''.__class__.x }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% set n = namespace(__class__=1) %}", "'__class__'"),
        ("{% set n = namespace() %}{% set n._a = 1 %}", "'_a'"),
        ("{% include 'x' %}", "no loader"),
    ],
)
def test_a_failure_names_the_line_and_the_reason(source: str, says: str) -> None:
    with pytest.raises(TemplateError, match=says) as caught:
        made(source).render(SAID)
    assert "\n" not in str(caught.value)


def test_a_template_that_does_not_compile_is_refused_at_once() -> None:
    with pytest.raises(TemplateError, match="'default' has a mistake in line 2"):
        made("\n{% for %}")


def test_a_conversation_without_messages_is_refused() -> None:
    with pytest.raises(TemplateError, match="at least one message"):
        made("x").render([])


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
        "{% for i in range(9999) %}{% for j in range(9999) if false %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for m in messages * 9999 recursive %}{{ loop(messages) }}{% endfor %}",
    ],
)
def test_a_template_without_end_is_ended(source: str) -> None:
    started = time.thread_time()
    with pytest.raises((TemplateLimitError, TemplateError)):
        made(source, steps=20_000).render(SAID)
    assert time.thread_time() - started < 20


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(2000) %}{{ 'x' }}{% endfor %}",
        "{{ 'x' * 2000 }}",
        "{{ 2000 * [1] }}",
        "{% set n = namespace(s='x') %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
        "{% set n = namespace(s='x') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    ],
)
def test_a_text_without_end_is_ended(source: str) -> None:
    with pytest.raises(TemplateLimitError, match="more than 1000 characters"):
        made(source, output_chars=1000).render(SAID)


def test_range_is_limited() -> None:
    with pytest.raises(TemplateError, match="range"):
        made("{% for i in range(1000000) %}{% endfor %}").render(SAID)


def test_limits_hold_for_each_rendering_alone() -> None:
    template = made("{% for i in range(90) %}x{% endfor %}", steps=100, output_chars=100)
    for _ in range(5):
        assert template.render(SAID) == "x" * 90


# --- what a template is given ----------------------------------------------------------------------


class Mood(str, enum.Enum):  # noqa: UP042  a StrEnum prints as its value anyway
    GLAD = "glad"


def test_a_template_sees_plain_values_alone() -> None:
    class Thing:
        def danger(self) -> str:
            return "called"

    message = {"role": Mood.GLAD, "n": True, "x": Thing(), "t": (1, 2.5), "none": None}
    text = made("{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}").render(
        [message]
    )
    assert text == "role=glad;n=True;x=<Thing>;t=[1, 2.5];"


def test_what_a_template_changes_stays_within_the_rendering() -> None:
    message = {"role": "user", "content": {"a": 1}}
    with pytest.raises(TemplateError):
        made("{{ messages[0].content.update({'a': 2}) }}").render([message])
    assert message == {"role": "user", "content": {"a": 1}}


def test_today_is_what_the_clock_says() -> None:
    def clock() -> dt.datetime:
        return dt.datetime(2031, 2, 3, tzinfo=dt.UTC)

    template = ChatTemplate({"default": "{{ strftime_now('%d %b %Y') }}"}, {}, clock=clock)
    assert template.render(SAID) == "03 Feb 2031"
    assert made("{{ strftime_now('%Y') }}").render(SAID) >= "2024"


def test_threads_render_at_the_same_time() -> None:
    template = made("{% for i in range(100) %}{{ messages[0].content }}{% endfor %}", steps=150)
    wrong: list[str] = []

    def work(name: str) -> None:
        for _ in range(100):
            text = template.render([{"role": "user", "content": name}])
            if text != name * 100:
                wrong.append(text)

    threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_errors_survive_pickling() -> None:
    for kind in (TemplateError, TemplateRefusedError, TemplateLimitError):
        assert str(pickle.loads(pickle.dumps(kind("why")))) == "why"
