"""What is said of users' errors and classes: none of their code runs for it, and it is short."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from pie.page.events import Part, PlaceId
from pie.page.key import PageKey
from pie.policies.choice_checks import checked
from pie.policies.cluster_manager import Asked, ClusterManager
from pie.policies.cluster_policy import ClusterView
from pie.policies.containing import is_builtin, is_own
from pie.policies.errors import BadChoiceError, PolicyError
from pie.policies.failing import class_name, reason_of
from pie.policies.loader import load_policies
from pie.policies.manager import RetentionManager
from pie.policies.retention import PageView
from pie.policies.routing import Choice
from pie.policies.telling import MOST_SAID, module_of, name_of, place_of, said_by, told, trace_of
from tests.policies.pages import view

RAN: list[str] = []
"""Code of a user's that has run: each of it could as well hang."""


@pytest.fixture(autouse=True)
def none_has_run() -> Iterator[None]:
    RAN.clear()
    yield
    assert not RAN


def runs(name: str) -> Callable[..., Any]:
    def ran(*_: object, **__: object) -> Any:
        RAN.append(name)
        raise RuntimeError(name)

    return ran


class Meta(type):
    """The class of classes whose every look runs code."""

    __getattr__ = __hash__ = __eq__ = __instancecheck__ = runs("class")
    __name__ = property(runs("name"))


class SaysError(Exception):
    """An error that runs code wherever it is looked at."""

    __str__ = __repr__ = __format__ = runs("text")
    __class__ = args = __traceback__ = property(runs("field"))
    __notes__ = property(runs("notes"))


class KindError(Exception, metaclass=Meta):
    __str__ = __repr__ = runs("text")


class Word(str):
    """A text with code of its own."""

    __slots__ = ()
    __str__ = __repr__ = __format__ = __len__ = __iter__ = __getitem__ = runs("word")


class RenamedError(ValueError):
    """Whose name is a text with code of its own."""


RenamedError.__name__ = Word("RenamedError")
RenamedError.__module__ = 5  # type: ignore[assignment]


def raised(error: BaseException) -> BaseException:
    try:
        raise error  # noqa: TRY301
    except BaseException as one:  # noqa: BLE001
        return one


class Small(int):
    __repr__ = __str__ = runs("number")


AT = raised(ValueError()).__traceback__.tb_lineno  # type: ignore[union-attr]
ERRORS = [
    (lambda: SaysError("x"), "SaysError"),
    (lambda: KindError("x"), "KindError"),
    (lambda: RenamedError("x"), "RenamedError: x"),
    (lambda: ValueError(Word("x")), "ValueError: <Word>"),
    (lambda: ValueError("x", SaysError(), 2), "ValueError: 'x', <SaysError>, 2"),
    (lambda: ValueError(Small(3)), "ValueError: <Small>"),
    (lambda: ValueError(10**5_000), "ValueError: <int>"),
    (ValueError, "ValueError"),
    (lambda: ValueError("a\nb\x1b\ud800"), "ValueError: a b  "),
    (lambda: KeyError({"held": 1}), "KeyError: <dict>"),
    (lambda: KeyError((b"k", 2)), "KeyError: (b'k', 2)"),
    (lambda: KeyError("k"), "KeyError: 'k'"),
    (lambda: OSError(2, "no file", "x"), "FileNotFoundError: [Errno 2] no file: 'x'"),
    (lambda: OSError(2, Word("no")), "FileNotFoundError: 2, <Word>"),
    (lambda: ImportError("no module"), "ImportError: no module"),
    (lambda: SyntaxError("bad", ("f.py", 1, 2, "x")), "SyntaxError: bad (f.py, line 1)"),
    (lambda: SyntaxError("bad", ("f.py", 1, 2, Word("x"))), "SyntaxError: bad (f.py, line 1)"),
    (lambda: ExceptionGroup("several", [SaysError()]), "ExceptionGroup: several (1 sub-exception)"),
    (lambda: SystemExit(3), "SystemExit: 3"),
]


@pytest.mark.parametrize(("make", "said"), ERRORS, ids=[said for _, said in ERRORS])
def test_an_error_is_told_without_its_code(make: Callable[[], BaseException], said: str) -> None:
    error = make()
    at = f"{__file__}:{AT}"
    assert told(raised(error)) == (f"{said} ({at})" if ":" in said else f"{said} at {at}")
    assert reason_of(error) == f"{said.partition(':')[0]} at {at}"
    assert is_own(error)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("x" * 5_000_000),
        ValueError(*["x" * 5_000_000] * 50),
        KeyError(b"x" * 5_000_000),
        KeyError((("x" * 500,) * 500,) * 500),
        OSError(2, "x" * 5_000_000),
        UnicodeDecodeError("utf-8", b"\xff" * 5_000_000, 0, 1, "x" * 5_000_000),
        type("X" * 5_000_000, (Exception,), {})(),
    ],
    ids=lambda error: type(error).__name__[:10],
)
def test_what_is_told_is_short(error: Exception) -> None:
    assert len(told(raised(error))) < 2 * MOST_SAID + len(__file__)
    assert len(said_by(error)) <= MOST_SAID + 20


def test_of_many_calls_the_last_are_told_and_no_cause() -> None:
    def deep(left: int) -> None:
        if not left:
            raise ValueError("deep") from SaysError()
        deep(left - 1)

    with pytest.raises(ValueError, match="deep") as caught:
        deep(300)
    trace = trace_of(caught.value)
    assert len(trace) == 20
    assert all(one.endswith("deep") and __file__ in one for one in trace)
    assert place_of(caught.value).startswith(f" at {__file__}:")
    assert not place_of(ValueError())


def test_a_class_is_named_without_its_code() -> None:
    assert (name_of(KindError), module_of(KindError)) == ("KindError", __name__)
    assert (name_of(RenamedError), module_of(RenamedError)) == ("RenamedError", "?")
    assert class_name(KindError()) == f"{__name__}:KindError"
    assert not is_builtin(KindError)
    assert not is_builtin(SaysError())


@pytest.mark.parametrize(
    "make",
    [
        KindError,
        lambda: Choice(KindError()),  # type: ignore[arg-type]
        lambda: Choice(SaysError()),  # type: ignore[arg-type]
        lambda: Choice("w", [SaysError()]),  # type: ignore[arg-type]
    ],
    ids=range(4),
)
def test_what_is_no_choice_is_refused_without_its_code(make: Callable[[], object]) -> None:
    with pytest.raises(BadChoiceError):
        checked(make(), {PlaceId("w")}, 1)


class Retention:
    """Raises or proposes what a test says."""

    def __init__(self, proposed: Iterable[object] = (), error: BaseException | None = None) -> None:
        self._proposed, self._error = proposed, error

    def stored(self, page: PageView, now_s: float) -> None: ...

    def hit(self, key: PageKey, part: Part, now_s: float) -> None: ...

    def removed(self, key: PageKey, part: Part) -> None: ...

    def victims(self, bytes_needed: int, now_s: float) -> Iterable[Any]:
        if self._error is not None:
            raise self._error
        return self._proposed

    def decide(self, view: ClusterView) -> Iterable[Any]:
        return self.victims(0, 0.0)


@pytest.mark.parametrize(
    "make",
    [lambda: SaysError("x"), lambda: KindError("x"), lambda: KeyError([SaysError()] * 400_000)],
    ids=["SaysError", "KindError", "KeyError"],
)
def test_a_manager_tells_of_an_error_without_its_code(
    make: Callable[[], BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    error = make()
    manager = RetentionManager(Retention(error=error))
    manager.stored(view(1), 0.0)
    with caplog.at_level(logging.ERROR):
        assert manager.victims(1, 0.0)
    assert manager.counts.failures == 1
    first, *calls = caplog.text.splitlines()
    assert f"Retention failed in victims(): {name_of(type(error))}" in first
    assert calls[-1].endswith("in Retention.victims")
    asked = ClusterManager([("own", Retention(error=error))]).ask(0, ClusterView(1, 1, [], 0.0))
    assert isinstance(asked, Asked)
    assert name_of(type(error)) in asked.failures[0]


class Pair(tuple[object, ...]):  # noqa: SLOT001
    __len__ = __iter__ = __getitem__ = __eq__ = __hash__ = runs("pair")


class Bytes(bytes):
    __len__ = __iter__ = __getitem__ = __eq__ = __hash__ = runs("bytes")


class Number(int):
    __mul__ = __rmul__ = __index__ = __eq__ = __le__ = __ge__ = __hash__ = runs("number")


KEY = view(1).key


@pytest.mark.parametrize(
    "proposal",
    [
        Pair((KEY, Part.FULL)),
        (Bytes(KEY), Part.FULL),
        (KEY, Number(0)),
        (KEY, 10**5_000),
        (KEY, -1),
        (KEY, True),
        (KEY * 100_000, Part.FULL),
        [KEY, Part.FULL],
    ],
    ids=lambda one: type(one).__name__,
)
def test_a_proposal_of_a_type_with_code_is_none(proposal: object) -> None:
    manager = RetentionManager(Retention([proposal]))
    manager.stored(view(1), 0.0)
    assert manager.victims(1, 0.0) == [(KEY, Part.FULL)]
    assert (manager.counts.failures, manager.counts.refused_unknown) == (0, 1)
    assert manager.counts.fallbacks == 1


class Once(Retention):
    """Can be made once."""

    made = 0

    def __init__(self) -> None:
        super().__init__()
        Once.made += 1
        if Once.made > 1:
            raise SaysError


def test_a_class_that_can_be_made_once_is_told_without_its_code_at_the_next_time() -> None:
    policies = load_policies(f"worker: {{retention: '{__name__}:Once'}}", name="f")
    name = f"{__name__}:Once"
    with pytest.raises(PolicyError, match=f"a new {name} cannot be made: SaysError at ") as caught:
        policies.new_retention_aside()
    assert caught.value.__suppress_context__
