"""Pages at rest against a dict, one at a time and as a list of a pack says them."""

from hypothesis import given, settings, strategies as st
from msgspec import structs

from pie.page.header import PageHeader
from pie.pool.conformance import sample_key, sample_page
from pie.pool.pack_index import Came, Left, decode_list, decode_records, encode_record, join
from pie.pool.rest_rows import Place, RestRows
from pie.pool.tier import PageId, columns_of, id_of

SECRET = bytes(range(32))


def header(number: int) -> PageHeader:
    page, _ = sample_page(number, 10, parent=number - 1 if number % 4 else None, secret=SECRET)
    group = sample_key(number - number % 4) if number % 3 else b""
    return structs.replace(page, group=group, tenant_tag=f"tenant {number % 2}")


def listed(numbers: list[int], *, left: list[int]) -> bytes:
    records: list[Came | Left] = [
        Came(number * 10, 10, number + 1, header(number)) for number in numbers
    ]
    records += [Left(number * 10, sample_key(number)) for number in left]
    return b"".join(encode_record(record, SECRET) for record in records)


@given(st.lists(st.one_of(st.integers(0, 40), st.sets(st.integers(0, 40), min_size=1))))
def test_rows_hold_what_a_dict_holds(changes: list[int | set[int]]) -> None:
    rows = RestRows[str]()
    held: dict[PageId, PageHeader] = {}
    for change in changes:
        if isinstance(change, set):
            columns = join([decode_list(listed(sorted(change), left=[]), SECRET).columns])
            again = rows.add_all(columns, lambda number: f"pack {number}")
            assert [id_of(came.header) in held for came in columns.came(again.tolist())] == [
                True
            ] * len(again)
            held |= {id_of(one): one for one in map(header, change)}
            continue
        one = header(change)
        if held.pop(id_of(one), None) is not None:
            rows.remove(rows.find(id_of(one)))
        else:
            rows.add(one, Place("alone", 1, 2), change + 1)
            held[id_of(one)] = one
    rows.check()
    assert {page: rows.header(rows.find(page)) for page in held} == held
    assert len(rows) == len(held)
    ordered = sorted(held.values(), key=lambda one: rows.stamp(rows.find(id_of(one))))
    assert list(rows.headers()) == ordered
    said, wanted = rows.columns(), columns_of(ordered)
    assert said.keys.tolist() == wanted.keys.tolist()
    assert said.parents.tolist() == wanted.parents.tolist()
    assert [said.tenant_tags[tag] for tag in said.tags] == [one.tenant_tag for one in ordered]


def test_a_list_says_in_columns_what_it_says_in_records() -> None:
    data = listed([1, 2, 3, 5], left=[2]) + listed([2], left=[])
    found = decode_list(data, SECRET)
    assert found.is_whole
    records, is_whole = decode_records(data, SECRET)
    assert is_whole
    came = [record for record in records if isinstance(record, Came)]
    assert list(found.columns.came(range(len(found.columns)))) == [came[0], *came[2:]]


def _pages(start: int, *, count: int, tenants: int) -> list[Came]:
    return [
        Came(
            number * 10,
            10,
            number + 1,
            structs.replace(header(number), tenant_tag=f"tenant {number % tenants}"),
        )
        for number in range(start, start + count)
    ]


_SOME = st.builds(_pages, st.integers(0, 30), count=st.integers(1, 40), tenants=st.integers(1, 2))
_LEFT = st.integers(0, 70).map(lambda number: [Left(number * 10, sample_key(number))])


@settings(max_examples=60)
@given(st.lists(_SOME | _LEFT, max_size=5), st.none() | st.integers(0, 1 << 15))
def test_pages_in_long_runs_are_read_as_they_are_one_by_one(
    parts: list[list[Came | Left]], damaged: int | None
) -> None:
    data = bytearray(b"".join(encode_record(record, SECRET) for part in parts for record in part))
    if data and damaged is not None:
        data[damaged % len(data)] ^= 1
    there: dict[int, Came] = {}
    records, is_whole = decode_records(bytes(data), SECRET)
    for record in records:
        there.pop(record.offset, None)
        if isinstance(record, Came):
            there[record.offset] = record
    found = decode_list(bytes(data), SECRET)
    assert found.is_whole == is_whole
    assert list(found.columns.came(range(len(found.columns)))) == list(there.values())


def test_a_page_that_fits_in_no_column_is_listed_all_the_same() -> None:
    odd = structs.replace(header(1), parent=b"short")
    record = Came(0, 10, 1, odd)
    data = encode_record(record, SECRET)
    assert decode_list(data, SECRET).others == [record]
    assert decode_records(data, SECRET) == ([record], True)
    assert not decode_list(data[:-1], SECRET).is_whole
