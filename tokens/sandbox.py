"""The jinja2 environment that chat templates run in.

Covers what a template may use and the limits that end it. Does not cover which template a model
has or what it is given (`pie.tokens.template`).

Filters, globals and syntax are those that transformers gives templates, so that a template
renders the same text. On top, a rendering counts: a template, which comes with a model from who
knows where, cannot keep a router busy for ever.

- every turn of a loop and every call of a macro is a step, and steps are limited;
- `range` gives 100,000 numbers at most (jinja2's own limit);
- the text, and any string or list that `+`, `~` or `*` make, is limited in length; so are
  the bits of `**`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.sandbox
import jinja2.utils
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.visitor import NodeTransformer

from pie.tokens.errors import TemplateLimitError, TemplateRefusedError

Clock = Callable[[], datetime]
"""Tells the local time, for templates that write today's date."""

_STEP = "__pie_step"
_JOINED = "__pie_joined"


@dataclass(frozen=True, slots=True)
class TemplateLimits:
    """What one rendering may take."""

    steps: int = 1_000_000
    """Turns of loops and calls of macros; a million take about a second."""
    output_chars: int = 16 * 1024 * 1024
    """Length of the text, and of any string or list on the way to it."""


@dataclass(slots=True)
class _Run:
    """One rendering."""

    limits: TemplateLimits
    steps: int = 0


_run: ContextVar[_Run] = ContextVar("pie_template_run")


@contextmanager
def limited(limits: TemplateLimits) -> Iterator[None]:
    """Count what is rendered within, by this thread or task, against `limits`."""
    token = _run.set(_Run(limits))
    try:
        yield
    finally:
        _run.reset(token)


def check_size(chars: int) -> None:
    """Refuse a text or list of this length.

    Raises:
        TemplateLimitError: It is longer than a rendering may be.
    """
    limit = _run.get().limits.output_chars
    if chars > limit:
        raise TemplateLimitError(f"The chat template made a text of more than {limit} characters.")


class ChatEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """A sandbox with what chat templates expect, and with limits.

    Render within `limited`.
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, jinja2.ext.loopcontrols],
        )
        self.intercepted_binops = frozenset({"+", "*", "**"})
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda format_: clock().strftime(format_)
        self.globals["dict"] = _Dict()
        self.globals["namespace"] = _Namespace
        self.globals[_STEP] = _step
        self.globals[_JOINED] = _joined

    def compile_chat(self, source: str) -> jinja2.Template:
        """Compile a template, with a step counted in every loop and macro.

        Raises:
            jinja2.TemplateSyntaxError: It does not compile.
        """
        tree = _Counted().visit(self.parse(source))
        tree.set_environment(self)
        return self.from_string(tree)

    def call_binop(
        self,
        context: Context,
        operator: str,
        left: Any,  # noqa: ANN401
        right: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        """Work out a binary operation, unless its result would be too large."""
        if operator == "**":
            if isinstance(left, int) and isinstance(right, int):
                check_size(left.bit_length() * right)
        elif operator == "+":
            check_size(_length(left) + _length(right))
        else:
            for sized, times in ((left, right), (right, left)):
                if isinstance(times, int):
                    check_size(_length(sized) * times)
        return super().call_binop(context, operator, left, right)


class _Counted(NodeTransformer):
    """Puts a step into every loop and macro, and a limit on every `~`."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        return self._with_step(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:  # noqa: N802
        return self._with_step(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:  # noqa: N802
        return self._with_step(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _call(_JOINED, node.nodes, node.lineno)

    def _with_step(self, node: nodes.For | nodes.Macro | nodes.CallBlock) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node, nodes.For) and node.test is not None:
            # What the test leaves out takes time too.
            step = _call(_STEP, [], node.lineno)
            node.test = nodes.And(step, node.test, lineno=node.lineno)
            return node
        node.body.insert(0, nodes.ExprStmt(_call(_STEP, [], node.lineno), lineno=node.lineno))
        return node


def _call(name: str, arguments: list[nodes.Expr], lineno: int) -> nodes.Call:
    """Return the call of a global function."""
    function = nodes.Name(name, "load", lineno=lineno)
    return nodes.Call(function, arguments, [], None, None, lineno=lineno)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`, which marks the assistant's part for training: its content as it is."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the block, in a scope of its own as transformers has it."""
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("content"), [], [], body).set_lineno(lineno)

    def content(self, caller: Callable[[], str]) -> str:
        """Return what the block renders to."""
        return caller()


class _Dict:
    """`dict` without the attributes of a class."""

    def __call__(self, *args: Any, **items: Any) -> dict[Any, Any]:  # noqa: ANN401
        return dict(*args, **items)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:  # noqa: ANN401
        """`dict.fromkeys`."""
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """`namespace` that keeps a template from reaching Python's own attributes."""

    def __init__(*args: Any, **attributes: Any) -> None:  # noqa: ANN401
        # `self` may be the name of an attribute.
        self, *rest = args
        made = dict(*rest, **attributes)
        for name in made:
            _check_attribute(name)
        jinja2.utils.Namespace.__init__(self, made)

    def __setitem__(self, name: str, value: object) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace has no attribute {name!r}")


def _step() -> bool:
    """Count a turn of a loop or a call of a macro; true, so that a test can begin with it."""
    run = _run.get()
    run.steps += 1
    if run.steps > run.limits.steps:
        raise TemplateLimitError(
            f"The chat template took more than {run.limits.steps} steps; it may never end."
        )
    return True


def _joined(*parts: object) -> str:
    """`~` with a limit."""
    texts = [str(part) for part in parts]
    check_size(sum(map(len, texts)))
    return "".join(texts)


def _length(value: object) -> int:
    return len(value) if isinstance(value, Sized) else 0


def _raise_exception(message: str) -> NoReturn:
    raise TemplateRefusedError(str(message))


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models have seen it: jinja2's own filter escapes what HTML would misread."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
