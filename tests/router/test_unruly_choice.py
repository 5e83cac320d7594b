"""Routing policies that change what they are shown or return what is no choice: the built-in one answers."""

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from pie.page.events import PlaceId, Tier
from pie.policies.choice_checks import checked
from pie.policies.errors import BadChoiceError
from pie.policies.routing import Choice, Cost, RequestView, WorkerView
from tests.router.test_choice import PAGE, Fleet

W0, W1 = PlaceId("w0"), PlaceId("w1")


class AlwaysEqual:
    """A place that says it is any other, and cannot be looked up."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


class Says:
    """A policy that does what a test says."""

    def __init__(self, says: Callable[[RequestView, Any], Any]) -> None:
        self._says = says

    def choose(self, request: RequestView, workers: Sequence[WorkerView]) -> Choice:
        return self._says(request, workers)  # type: ignore[no-any-return]


def cost(place: object = W0, ms: object = 1.0) -> Any:
    return Cost(place, ms, 0.0, 0.0, 0.0, 0.0)  # type: ignore[arg-type]


def choice(place: object = W0, costs: object = ()) -> Any:
    return Choice(place, costs)  # type: ignore[arg-type]


def clears(_: RequestView, workers: Any) -> Any:
    workers.clear()
    return choice()


def adds(_: RequestView, workers: Any) -> Any:
    workers.append(msgspec.structs.replace(workers[0], place=PlaceId("ghost")))
    return choice("ghost")


def writes_loads(_: RequestView, workers: Any) -> Any:
    workers[0].loads["host"] = 1_000
    return choice()


def writes_rates(_: RequestView, workers: Any) -> Any:
    workers[0].load_tokens_per_s["host"] = 1e9
    return choice()


def clears_keys(request: Any, _: Any) -> Any:
    request.keys.clear()
    return choice()


def raises(error: Exception) -> Callable[..., Any]:
    def says(_request: object, _workers: object) -> Any:
        raise error

    return says


class DuckChoice:
    """Has a place, and is no choice."""

    place = W0


class ChoiceWithCode(Choice, frozen=True):
    """A choice that could run code wherever it is read."""


class FloatWithCode(float):
    """A number with code of its own."""

    def __float__(self) -> float:
        raise RuntimeError("code")


class NameWithCode(str):
    """A name with code of its own."""

    __slots__ = ()

    def __hash__(self) -> int:
        raise RuntimeError("code")


RETURNED = [
    (None, "NoneType in place of a Choice"),
    (DuckChoice(), "DuckChoice in place of a Choice"),
    (ChoiceWithCode(W0), "ChoiceWithCode in place of a Choice"),
    (choice("ghost"), "chose 'ghost', which is no candidate"),
    (choice(AlwaysEqual()), "a place that is AlwaysEqual, not str"),
    (choice(W0, None), "costs are NoneType"),
    (choice(W0, ("x", object())), "one of its costs is str"),
    (choice(W0, (cost(), cost(), cost())), "3 costs of 2 candidates"),
    (choice(W0, (cost("ghost"),)), "told a cost of 'ghost', which is no candidate"),
    (choice(W0, (cost(ms="1"),)), "a cost is str, not a number"),
    (choice(W0, (cost(ms=math.nan),)), "no finite number"),
    (choice(W0, (cost(ms=math.inf),)), "no finite number"),
    (choice(W0, (cost(ms=1 << 4_000),)), "no finite number"),
]


@pytest.mark.parametrize("does", [clears, adds, writes_loads, writes_rates, clears_keys])
def test_what_a_policy_is_shown_cannot_be_changed(does: Callable[..., Any]) -> None:
    fleet = Fleet(Says(does))
    fleet.store("w1", Tier.DEVICE, slice(5))
    assert fleet.choose() == ("w1", 5 * PAGE)
    assert fleet.metrics.total(fleet.metrics.policy_failures) == 1


@pytest.mark.parametrize(("returned", "said"), RETURNED)
def test_what_is_no_choice_is_refused_with_a_reason(
    returned: Any, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = Fleet(Says(lambda _request, _workers: returned))
    fleet.store("w1", Tier.DEVICE, slice(5))
    with caplog.at_level(logging.ERROR, "pie.router.choice"):
        assert fleet.choose() == ("w1", 5 * PAGE)
    assert fleet.metrics.total(fleet.metrics.policy_failures) == 1
    assert f"{__name__}:Says failed in choose(): " in caplog.text
    assert said in caplog.text
    assert "; `cost` chooses instead" in caplog.text


def test_a_choice_is_taken_without_the_policys_code() -> None:
    costs = [cost(W1, 2), cost(W0, FloatWithCode(1.5))]
    taken = checked(choice(NameWithCode("w0"), costs), {W0, W1}, 2)
    assert type(taken.place) is str
    assert taken == Choice(W0, (cost(W1, 2.0), cost(W0, 1.5)))
    assert all(type(one.total_ms) is float for one in taken.costs)


@pytest.mark.parametrize(
    "says",
    [
        lambda _request, _workers: choice("x" * 10_000_000),
        lambda _request, _workers: type("X" * 10_000_000, (), {})(),
        raises(BadChoiceError("x" * 10_000_000)),
        raises(BadChoiceError()),
        raises(type("X" * 10_000_000, (Exception,), {})()),
    ],
)
def test_a_failure_is_logged_in_few_words(says: Any, caplog: pytest.LogCaptureFixture) -> None:
    fleet = Fleet(Says(says))
    with caplog.at_level(logging.ERROR, "pie.router.choice"):
        fleet.choose()
    assert len(caplog.records) == 1
    assert len(caplog.records[0].getMessage()) < 1_000


def test_the_log_does_not_say_what_a_client_called_its_session(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def looks_up(request: RequestView, _: object) -> Any:
        known: dict[str | None, Choice] = {}
        return known[request.session]

    fleet = Fleet(Says(looks_up))
    with caplog.at_level(logging.DEBUG):
        fleet.choose(session="alice@example.com")
    assert f"{__name__}:Says failed in choose(): KeyError at {__file__}:" in caplog.text
    assert "alice" not in caplog.text
