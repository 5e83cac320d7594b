"""Options as a policy file would say them: what is printed is read as what it was."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import given, strategies as st

from pie.policies.options import check_options
from pie.policies.rules import Pin, Ttl
from pie.policies.saying import said
from pie.policies.units import bytes_text, seconds_text


class Anything:
    def __init__(self, **options: object) -> None:
        self.options = options


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (86400.0, "1d"),
        (172800.0, "2d"),
        (5400.0, "90m"),
        (61.0, "61s"),
        (0.5, "500ms"),
        (0.00025, "0.00025s"),
        (1e-7, "0.0000001s"),
    ],
)
def test_a_time_has_the_largest_unit_that_goes_into_it(value: float, text: str) -> None:
    assert seconds_text(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(1, "1"), (1000, "1000"), (1 << 10, "1KiB"), (3 << 30, "3GiB"), (1 << 60, "1024PiB")],
)
def test_a_size_has_the_largest_unit_that_goes_into_it(value: int, text: str) -> None:
    assert bytes_text(value) == text


@given(st.floats(min_value=0, exclude_min=True, max_value=10_000 * 86_400.0))
def test_any_time_is_read_as_it_was(value: float) -> None:
    assert check_options(Ttl, {"after": yaml.safe_load(seconds_text(value))}) == (
        {"after": value},
        [],
    )


@given(st.integers(1, 1 << 60) | st.integers(1, 1 << 12).map(lambda count: count << 30))
def test_any_size_is_read_as_it_was(value: int) -> None:
    assert check_options(Pin, {"max": yaml.safe_load(bytes_text(value))}) == ({"max": value}, [])


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(plain)
def test_any_option_is_one_line_that_is_read_as_it_was(value: object) -> None:
    text = said(Anything, {"option": value})["option"]
    assert yaml.safe_load(text) == value
    assert len(text.splitlines()) <= 1


def test_what_no_file_has_is_told_all_the_same() -> None:
    assert said(Anything, {"a": ("x",), "b": frozenset({1}), "c": Anything}) == {
        "a": "[x]",
        "b": "[1]",
        "c": repr(Anything),
    }
