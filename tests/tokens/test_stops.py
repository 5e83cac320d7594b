from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from pie.tokens.stops import StopMatcher, StopResult


def run(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    """Push pieces one by one and return what was shown and what matched."""
    matcher = StopMatcher(stops)
    shown = ""
    for piece in pieces:
        result = matcher.push(piece)
        shown += result.text
        if result.matched is not None:
            assert matcher.push("more") == StopResult("", result.matched)
            break
    return shown + matcher.flush(), matcher.matched


def naive(stops: list[str], text: str) -> tuple[str, str | None]:
    """The stop string that is complete first, the longest of several, found by looking."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


def cut(text: str, cuts: list[int]) -> list[str]:
    at = sorted({0, len(text), *(c % (len(text) + 1) for c in cuts)})
    return [text[a:b] for a, b in pairwise(at)]


letters = st.text("ab\n", max_size=40)
stop_lists = st.lists(st.text("ab\n", min_size=1, max_size=6), max_size=5)
anything = st.text(max_size=40)


@given(stops=stop_lists, text=letters, cuts=st.lists(st.integers(0, 1000)))
def test_any_split_gives_what_looking_at_the_whole_text_gives(
    stops: list[str], text: str, cuts: list[int]
) -> None:
    assert run(stops, cut(text, cuts)) == naive(stops, text)


@given(
    stops=st.lists(st.text(min_size=1, max_size=3), max_size=4),
    text=anything,
    cuts=st.lists(st.integers(0, 1000)),
)
def test_any_characters_give_what_looking_at_the_whole_text_gives(
    stops: list[str], text: str, cuts: list[int]
) -> None:
    assert run(stops, cut(text, cuts)) == naive(stops, text)


@given(stops=stop_lists, text=letters)
def test_only_what_could_begin_a_stop_string_is_held_back(stops: list[str], text: str) -> None:
    matcher = StopMatcher(stops)
    shown = ""
    for at, char in enumerate(text, start=1):
        result = matcher.push(char)
        shown += result.text
        if result.matched is not None:
            return
        held = text[len(shown) : at]
        could = (text[at - n : at] for n in range(at, 0, -1))
        longest = next((t for t in could if any(s.startswith(t) for s in stops)), "")
        assert held == longest


def test_text_before_the_stop_is_shown_and_nothing_after() -> None:
    matcher = StopMatcher(["\n\nUser:", "</s>"])
    assert matcher.push("Hello\n") == StopResult("Hello")
    assert matcher.push("\nUs") == StopResult("")
    assert matcher.push("er: more") == StopResult("", "\n\nUser:")
    assert matcher.flush() == ""


def test_what_turned_out_not_to_be_a_stop_is_shown() -> None:
    matcher = StopMatcher(["abc"])
    assert matcher.push("xab") == StopResult("x")
    assert matcher.push("abd") == StopResult("ababd")
    assert matcher.flush() == ""


def test_a_stop_within_a_longer_ones_beginning_is_found() -> None:
    assert run(["abcd", "bc"], ["xab", "cd"]) == ("xa", "bc")


def test_of_two_complete_at_once_the_longer_wins() -> None:
    assert run(["c", "abc"], ["xabc"]) == ("x", "abc")


def test_without_stops_everything_passes_at_once() -> None:
    matcher = StopMatcher()
    assert matcher.push("anything") == StopResult("anything")
    assert matcher.flush() == ""


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        StopMatcher(["a", ""])


def test_a_text_goes_on_elsewhere_after_its_beginning_was_pushed() -> None:
    stops, text = ["stop here"], "a text that will stop here, or not"
    for at in range(len(text)):
        first, second = StopMatcher(stops), StopMatcher(stops)
        shown = first.push(text[:at])
        second.push(text[:at])
        if shown.matched is None:
            rest = second.push(text[at:])
            assert shown.text + rest.text == "a text that will "
            assert rest.matched == "stop here"


def test_time_grows_with_the_text_alone() -> None:
    """Held-back text that fails at its last character, again and again, is not looked at again."""
    stop = "a" * 2000 + "b"
    matcher = StopMatcher([stop])
    started = time.thread_time()
    shown = sum(len(matcher.push("a").text) for _ in range(100_000))
    assert shown == 100_000 - 2000
    assert time.thread_time() - started < 20
