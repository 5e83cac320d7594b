"""The jinja2 environment that chat templates run in.

Covers what a template may use, and that each of its operations asks before it works. Does not
cover the limits (`pie.tokens.limits`), what filters and methods ask (`pie.tokens.filters`,
`pie.tokens.methods`), or which template a model has and what it is given
(`pie.tokens.template`).

Filters, globals and syntax are those that transformers gives templates, so that a template
renders the same text. On top, a template, which comes with a model from who knows where, cannot
keep a router busy or fill its memory:

- every turn of a loop and every call of a macro is a step, and steps are limited;
- operators, comparisons, slices, filters, methods and output refuse what would be too large, and
  count what they make;
- `range` gives 100,000 numbers at most (jinja2's own limit).

What is missing for that reason: `lipsum`, encodings other than UTF-8 and its like, and methods
that no template has use for, such as `str.translate` and `int.to_bytes`.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.sandbox
import jinja2.utils
from jinja2 import nodes
from jinja2.nodes import EvalContext
from jinja2.parser import Parser
from jinja2.runtime import Context, markup_join
from markupsafe import Markup

from pie.tokens.counting import Counted
from pie.tokens.errors import TemplateLimitError, TemplateRefusedError
from pie.tokens.filters import compared, guarded_filter, guarded_test, listed, to_json
from pie.tokens.formatting import ESCAPE_FACTOR, EscapingFormatter, Formatter, check_percent
from pie.tokens.limits import check_bits, current
from pie.tokens.methods import check_method, is_allowed
from pie.tokens.weight import length, weigh

Clock = Callable[[], datetime]
"""Tells the local time, for templates that write today's date."""

_SLOT_BYTES = 8
_FORMAT_CHARS = 1024
_REFUSAL_CHARS = 1000
_MOST_ATTRIBUTES = 4096
"""Templates may make up names."""


class ChatEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """A sandbox with what chat templates expect, and with limits.

    Render within `pie.tokens.limits.limited`.
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, jinja2.ext.loopcontrols],
            # Nothing is worked out before a rendering counts.
            optimized=False,
            finalize=_written,
        )
        self._is_safe: dict[tuple[type, str], bool] = {}
        """Whether templates may use an attribute of values of a type, as far as that was asked."""
        self.intercepted_binops = frozenset({"+", "-", "*", "%", "**"})
        self.filters["tojson"] = to_json
        self.filters = {name: guarded_filter(name, work) for name, work in self.filters.items()}
        self.tests = {name: guarded_test(name, work) for name, work in self.tests.items()}
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _Today(clock)
        self.globals["dict"] = _Dict()
        self.globals["namespace"] = _Namespace
        self.concat = _concatenated  # type: ignore[method-assign]
        self.pie_step = _step
        self.pie_joined = _joined
        self.pie_made = _made
        self.pie_key = _key
        self.pie_compared = _compared
        self.pie_searched = _searched
        self.pie_sliced = _sliced

    def compile_chat(self, source: str) -> jinja2.Template:
        """Compile a template, with its operations counted.

        Raises:
            jinja2.TemplateSyntaxError: It does not compile.
        """
        tree = Counted().visit(self.parse(source))
        tree.set_environment(self)
        template = self.from_string(tree)
        # jinja2 makes a chain of dictionaries of these and goes through it anew for each rendering.
        template.globals = dict(template.globals)
        return template

    def call(
        self,
        context: Context,
        obj: Any,  # noqa: ANN401
        /,
        *args: Any,  # noqa: ANN401
        **named: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        """Call what a template calls, unless that would make or read too much."""
        if isinstance(obj, types.FunctionType) and obj in _OWN:
            return obj(*args)
        current().tick()
        args = check_method(obj, args, named)
        return current().note(super().call(context, obj, *args, **named))

    def call_binop(
        self,
        context: Context,
        operator: str,
        left: Any,  # noqa: ANN401
        right: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        """Work out a binary operation, unless its result would be too large."""
        if operator == "+" and type(left) is str and type(right) is str:
            # Most of what templates do, in a fraction of the time.
            return current().joined(left, right)
        _BINARY_CHECKS[operator](left, right)
        return current().note(super().call_binop(context, operator, left, right))

    def getitem(self, obj: Any, argument: Any) -> Any:  # noqa: ANN401
        """Return an item, its key looked at first."""
        if not isinstance(argument, str | int):
            _key(argument)
        return super().getitem(obj, argument)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:  # noqa: ANN401
        """Whether a template may use an attribute, which must be among those allowed."""
        # What jinja2 looks at and what we do is the value's type, in a dozen steps.
        named = (type(obj), attr)
        is_safe = self._is_safe.get(named)
        if is_safe is None:
            is_safe = super().is_safe_attribute(obj, attr, value) and is_allowed(obj, attr)
            if len(self._is_safe) < _MOST_ATTRIBUTES:
                self._is_safe[named] = is_safe
        return is_safe

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:  # noqa: ANN401
        """Return a limited `str.format` or `str.format_map`, where `value` is one of them."""
        if super().wrap_str_format(value) is None:
            return None
        text: str = value.__self__
        is_map = value.__name__ == "format_map"

        def formatted(*args: Any, **named: Any) -> str:  # noqa: ANN401
            given: Any = named
            if is_map:
                (given,), args = args, ()
            if isinstance(text, Markup):
                formatter = EscapingFormatter(self, escape=text.escape)
                # The formatter escapes what it puts in.
                return Markup(formatter.vformat(text, args, given))  # noqa: S704
            return Formatter(self).vformat(text, args, given)

        return formatted


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
        return dict(*map(_pairs, args), **items)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:  # noqa: ANN401
        """`dict.fromkeys`."""
        return dict.fromkeys(*map(_pairs, args))


def _pairs(values: Any) -> Any:  # noqa: ANN401
    """What a dictionary is made of."""
    values = listed(values)
    weigh(values)
    return values


class _Namespace(jinja2.utils.Namespace):
    """`namespace` that keeps a template from reaching Python's own attributes."""

    def __init__(*args: Any, **attributes: Any) -> None:  # noqa: ANN401
        # `self` may be the name of an attribute.
        self, *rest = args
        made = dict(*map(_pairs, rest), **attributes)
        for name in made:
            _check_attribute(name)
        jinja2.utils.Namespace.__init__(self, made)

    def __setitem__(self, name: str, value: object) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace has no attribute {name!r}")


def _add(left: object, right: object) -> None:
    if isinstance(left, str) or isinstance(right, str):
        escaped = hasattr(left, "__html__") or hasattr(right, "__html__")
        chars = _chars(left) + _chars(right)
        current().check_size(chars * (ESCAPE_FACTOR if escaped else 1))
    else:
        current().check_size(_SLOT_BYTES * (_slots(left) + _slots(right)))


def _subtract(left: object, right: object) -> None:
    for value in (left, right):
        if not isinstance(value, int | float):
            # Keys of dictionaries: their difference is a set.
            weigh(value)


def _multiply(left: object, right: object) -> None:
    if isinstance(left, int) and isinstance(right, int):
        check_bits(left.bit_length() + right.bit_length() - 1)
    for sized, times in ((left, right), (right, left)):
        if isinstance(times, int):
            each = _chars(sized) or _SLOT_BYTES * _slots(sized)
            current().check_size(each * max(0, times))


def _remainder(left: object, right: object) -> None:
    if isinstance(left, bytes):
        raise TypeError("a template formats text, not bytes")
    if isinstance(left, str):
        check_percent(left, right)


def _power(left: object, right: object) -> None:
    if isinstance(left, int) and isinstance(right, int) and right > 0 and abs(left) > 1:
        # 2 has two bits, its square three.
        check_bits((left.bit_length() - 1) * right)


_BINARY_CHECKS: Mapping[str, Callable[[Any, Any], None]] = {
    "+": _add,
    "-": _subtract,
    "*": _multiply,
    "%": _remainder,
    "**": _power,
}


def _chars(value: object) -> int:
    return len(value) if isinstance(value, str | bytes) else 0


def _slots(value: object) -> int:
    return len(value) if isinstance(value, bytes | list | tuple) else 0


@jinja2.pass_eval_context
def _written(_: EvalContext, value: object) -> object:
    """Return what an expression puts out, unless it is too long."""
    current().check_size(length(value))
    return value if isinstance(value, str) else current().note(str(value))


def _concatenated(pieces: Iterable[str]) -> str:
    """Join what a block has put out."""
    listed = pieces if isinstance(pieces, list) else list(pieces)
    current().check_size(sum(map(len, listed)))
    return current().note("".join(listed))


def _step() -> bool:
    return current().step()


@jinja2.pass_eval_context
def _joined(context: EvalContext, *parts: object) -> str:
    """`~` with a limit."""
    run = current()
    chars = 0
    for part in parts:
        chars += length(part)
        run.check_size(chars)
    if context.autoescape:
        run.check_size(ESCAPE_FACTOR * chars)
        return run.note(markup_join(parts))
    return run.note("".join(map(str, parts)))


def _made(value: object) -> object:
    """A list, tuple or dictionary that a template spells out."""
    return current().note(value)


def _key(value: object) -> object:
    """What is hashed: of a tuple, all of it."""
    current().tick()
    if isinstance(value, str):
        return value
    weigh(value, escaped=True)
    return value


def _compared(value: object) -> object:
    compared(value)
    return value


def _searched(value: object) -> object:
    """What `in` looks through; a dictionary is not gone through."""
    if not isinstance(value, dict):
        compared(value)
    return value


def _sliced(value: Any, start: object, stop: object, step: object) -> object:  # noqa: ANN401
    run = current()
    run.check_size(_chars(value) + _SLOT_BYTES * _slots(value))
    return run.note(value[start:stop:step])


_OWN: frozenset[object] = frozenset({_step, _made, _key, _compared, _searched, _sliced})


class _Today:
    """`strftime_now`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def __call__(self, format_: Any) -> str:  # noqa: ANN401
        """Return the local time in a form."""
        if len(format_) > _FORMAT_CHARS:
            raise TemplateLimitError(
                f"The chat template writes a date by a form of more than {_FORMAT_CHARS} characters."
            )
        return self._clock().strftime(format_)


def _raise_exception(message: object) -> NoReturn:
    length(message)
    text = " ".join(str(message)[: 4 * _REFUSAL_CHARS].split())
    raise TemplateRefusedError(
        text[:_REFUSAL_CHARS] or "The chat template refuses this conversation."
    )
