"""The table of pages against a dict."""

from hypothesis import given, strategies as st

from pie.page.events import Part
from pie.policies.page_rows import NO_ROW, PageRows
from tests.policies.pages import key, view


@given(st.lists(st.tuples(st.integers(0, 400), st.sampled_from(Part), st.integers(0, 400))))
def test_rows_are_found_whatever_came_and_went(
    changes: list[tuple[int, Part, int]],
) -> None:
    rows = PageRows()
    held: dict[tuple[int, Part], int] = {}
    for at, part, parent in changes:
        row = held.pop((at, part), None)
        if row is not None:
            rows.remove(rows.find(key(at), part))
        else:
            held[at, part] = rows.add(view(at, parent, part=part))
    rows.check()
    assert len(rows) == len(held)
    for (at, part), row in held.items():
        assert rows.find(key(at), part) == row
    assert rows.find(key(9_999), Part.FULL) == NO_ROW


def test_thousands_of_pages_come_and_go() -> None:
    rows = PageRows()
    for at in range(5_000):
        rows.add(view(at, at - 1 if at else None))
    for at in range(0, 5_000, 3):
        rows.remove(rows.find(key(at), Part.FULL))
    rows.check()
    assert sorted(rows.key(row) for row in rows) == [key(at) for at in range(5_000) if at % 3]


def test_a_row_is_used_again() -> None:
    rows = PageRows()
    first = rows.add(view(1))
    rows.remove(first)
    assert {first, rows.add(view(2))} <= {0, 1}
    assert rows.capacity == 2, "one of them is the root's"
