"""Which named prefix a page belongs to, also under a tenant's root; held against keys computed one by one."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from pie.page.events import Part, Tier
from pie.page.key import PageKey, RootKey, keys_after, packed_pages, page_keys, tenant_root
from pie.page.key_table import as_keys
from pie.policies import prefix_tree
from pie.policies.loader import load_policies
from pie.policies.lru import LruRetention
from pie.policies.manager import RetentionManager
from pie.policies.page_rows import PageRows
from pie.policies.prefix_tree import FoundPages, PrefixPage, tree_of
from pie.policies.prefix_warnings import short_prefixes
from pie.policies.prefixes import LeadingPages, NamedPrefix, Prefixes
from pie.policies.retention import PageView
from pie.policies.rules import Pin, Rule, Ruled, Selector

MODELS = [RootKey(bytes([number]) * 32) for number in (1, 2)]
SALTS = [None, "", "one", "two"]
PAGE = 2

tokens = st.lists(st.integers(0, 2), min_size=1, max_size=9)
sequences = st.tuples(st.sampled_from(MODELS), st.sampled_from(SALTS), tokens)


def views(model: RootKey, salt: str | None, sequence: list[int]) -> list[PageView]:
    """Return the pages of a sequence as tiers see them."""
    root = tenant_root(model, salt=salt)
    keys = page_keys(root, sequence, PAGE)
    return [
        PageView(
            key,
            keys[at - 1] if at else root,
            at,
            Part.FULL,
            Tier.HOST,
            1,
            model_root=model,
            page_tokens=PAGE,
        )
        for at, key in enumerate(keys)
    ]


def leading(pages: list[PageView]) -> LeadingPages:
    return LeadingPages(
        as_keys([page.key for page in pages]),
        as_keys([page.parent for page in pages]),
        np.array([page.index for page in pages], np.int32),
    )


def expected(
    named: dict[str, list[int]], model: RootKey, salt: str | None, key: PageKey
) -> set[str]:
    root = tenant_root(model, salt=salt)
    return {name for name, of_it in named.items() if key in page_keys(root, of_it, PAGE)}


@given(st.dictionaries(st.sampled_from("abcdefgh"), tokens), st.lists(sequences, max_size=12))
def test_a_page_belongs_to_the_prefixes_whose_tokens_it_has_whatever_its_salt(
    named: dict[str, list[int]], asked: list[tuple[RootKey, str | None, list[int]]]
) -> None:
    prefixes = Prefixes({name: NamedPrefix(tokens=of_it) for name, of_it in named.items()})
    for model, salt, sequence in asked:
        pages = views(model, salt, sequence)
        for page in pages:
            names = expected(named, model, salt, page.key)
            assert prefixes.names_of(page) == names
            # Asked again, and in device memory, where views say nothing of the size of pages.
            assert prefixes.names_of(replace(page, page_tokens=0)) == names
        root = tenant_root(model, salt=salt)
        anew = Prefixes(prefixes.named)
        anew.meet(model, PAGE)
        for count in range(1, len(pages) + 1):
            keys = [page.key for page in pages[:count]]
            found = expected(named, model, salt, keys[-1])
            assert prefixes.names_along(model, root, keys) == found
            if anew is not prefixes:
                assert anew.names_along(model, root, keys) == found


@given(st.data())
def test_pages_that_are_there_already_are_told_in_whichever_order_they_come(
    data: st.DataObject,
) -> None:
    named = data.draw(st.dictionaries(st.sampled_from("abcd"), tokens, min_size=1))
    asked = data.draw(st.lists(sequences, max_size=8))
    whole = [(page, one) for one in asked for page in views(*one)]
    shuffled = data.draw(st.permutations(whole))
    prefixes = Prefixes({name: NamedPrefix(tokens=of_it) for name, of_it in named.items()})
    for model in MODELS:
        prefixes.meet(model, PAGE)
    cut = data.draw(st.integers(0, len(shuffled)))
    parts = [[page for page, _ in some] for some in (shuffled[:cut], shuffled[cut:])]
    prefixes.learn([leading(some) for some in parts if some] or [leading([])])
    for page, (model, salt, _) in shuffled:
        assert prefixes.names_of(page) == expected(named, model, salt, page.key)


def test_a_page_whose_sequence_was_not_seen_from_its_beginning_is_not_known() -> None:
    prefixes = Prefixes({"desk": NamedPrefix(tokens=[1, 2, 3, 4])})
    first, second = views(MODELS[0], "mine", [1, 2, 3, 4])
    assert not prefixes.names_of(second)
    assert prefixes.names_of(first) == {"desk"}
    assert prefixes.names_of(second) == {"desk"}


@pytest.mark.parametrize("count", [3, 300])
def test_many_pages_may_come_after_one(count: int) -> None:
    tree, depth = tree_of({f"p{n}": [7, n, n, n] for n in range(count)}, 2)
    assert (len(tree.pages), depth) == (count, 2)
    found = FoundPages(most_heads=2)
    for salt in ("one", "two", "three", "one"):
        root = tenant_root(MODELS[0], salt=salt)
        for n in range(count):
            first, second = page_keys(root, [7, n, n, n], 2)
            page = found.find(tree, root, first)
            assert page is not None
            assert page.names == {f"p{n}"}
            assert found.find(page, first, second) is page.pages[0]
        other = page_keys(root, [8, 8], 2)[0]
        assert found.find(tree, root, other) is None
    assert len(found._heads) <= 2


def test_no_more_keys_are_remembered_than_allowed() -> None:
    tree, _ = tree_of({"desk": [1, 2]}, 2)
    found = FoundPages(most_keys=3)

    def see(salt: str) -> PageKey:
        root = tenant_root(MODELS[0], salt=salt)
        key = page_keys(root, [1, 2], 2)[0]
        assert isinstance(found.find(tree, root, key), PrefixPage)
        return key

    keys = [see(salt) for salt in "abc"]
    assert found.get(keys[0]) is not None
    keys.append(see("d"))
    assert [found.get(key) is not None for key in keys] == [True, False, True, True]
    assert len(found) == 3


POLICIES = """
prefixes:
  desk: {tokens: [1, 2, 3, 4]}
worker:
  rules:
    - match: {prefix: desk}
      action: persist-prefix
"""


def managed() -> RetentionManager:
    return RetentionManager(load_policies(POLICIES, name="policies.yaml").new_retention())


def persistent(manager: RetentionManager) -> set[PageKey]:
    return {key for key, _ in manager.persistent()}


def test_a_rule_on_a_prefix_is_for_every_tenants_pages() -> None:
    manager = managed()
    wanted = set()
    for salt in SALTS:
        pages = views(MODELS[0], salt, [1, 2, 3, 4, 5, 6])
        wanted |= {page.key for page in pages[:2]}
        for page in [*pages, *views(MODELS[0], salt, [2, 2, 3, 4])]:
            manager.stored(page, 0.0)
    assert persistent(manager) == wanted
    assert len(wanted) == 2 * len(SALTS), "no two tenants share a page"


@given(
    st.dictionaries(st.sampled_from("abcd"), tokens, min_size=4),
    st.lists(st.tuples(st.sampled_from([None, *"abcd"]), st.sampled_from([None, "", "x"]))),
    tokens,
)
def test_a_page_falls_under_the_first_rule_that_is_for_it(
    given_tokens: dict[str, list[int]],
    selected: list[tuple[str | None, str | None]],
    sequence: list[int],
) -> None:
    prefixes = Prefixes({name: NamedPrefix(tokens=each) for name, each in given_tokens.items()})
    rules = [Rule(Selector(prefix=name, tenant=tag), "pin", Pin()) for name, tag in selected]
    manager = RetentionManager(Ruled(LruRetention(), tuple(rules), prefixes))
    matched = [0] * len(rules)
    for page in views(MODELS[0], "one", sequence):
        manager.stored(page, 0.0)
        names = expected(given_tokens, MODELS[0], "one", page.key)
        for number, (name, tag) in enumerate(selected):
            if (name is None or name in names) and tag in (None, page.tenant_tag):
                matched[number] += 1
                break
    assert manager._book is None or manager._book.matched == matched
    manager.check()


def test_rules_for_other_prefixes_cost_a_page_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"prefix{number}" for number in range(100)]
    prefixes = Prefixes({name: NamedPrefix(tokens=[1, 2, at]) for at, name in enumerate(names)})
    rules = [Rule(Selector(prefix=name), "pin", Pin()) for name in [*names, None, *names[:2]]]
    manager = RetentionManager(Ruled(LruRetention(), tuple(rules), prefixes))
    looked_at: list[Selector] = []
    matches = Selector.matches

    def counted(selector: Selector, page: PageView, of: Collection[str] = ()) -> bool:
        looked_at.append(selector)
        return matches(selector, page, of)

    monkeypatch.setattr(Selector, "matches", counted)
    for sequence, count in (([2, 2, 2, 2], 2), ([1, 2, 3, 4], len(rules) + 1)):
        looked_at.clear()
        for page in views(MODELS[0], "one", sequence):
            manager.stored(page, 0.0)
        assert len(looked_at) == count


def test_a_rule_that_comes_later_is_for_the_pages_that_are_there() -> None:
    manager = RetentionManager(LruRetention())
    pages = views(MODELS[0], "mine", [1, 2, 3, 4, 5, 6])
    for page in reversed(pages):
        manager.stored(page, 0.0)
    handed = manager.begin_replace(load_policies(POLICIES, name="policies.yaml").new_retention())
    handed.put_in_order()
    manager.prefixes.meet(MODELS[0], PAGE)
    depth = manager.prefixes.depth
    manager.prefixes.learn(
        [manager.leading(row, row + 2, depth) for row in range(0, manager.capacity, 2)]
    )
    by_key = {page.key: page for page in pages}
    while some := handed.take(1):
        manager.move_over(by_key[some[0][0]], 1.0)
    manager.end_replace()
    assert persistent(manager) == {page.key for page in pages[:2]}


def test_leading_pages_are_those_held_at_the_beginning_of_their_sequences() -> None:
    rows = PageRows()
    pages = views(MODELS[0], "mine", [1, 2, 3, 4, 5, 6, 7, 8])
    for page in pages:
        rows.add(page)
    rows.remove(rows.find(pages[1].key, Part.FULL))
    found = rows.leading(0, rows.capacity, 3)
    assert found.indexes.tolist() == [0, 2]
    assert [key.tobytes() for key in found.keys] == [pages[0].key, pages[2].key]
    assert [key.tobytes() for key in found.parents] == [pages[0].parent, pages[1].key]


def test_a_prefix_that_fills_no_page_is_warned_of_where_it_stands() -> None:
    policies = load_policies(
        "prefixes:\n"
        "  short: {tokens: [1, 2, 3]}\n"
        "  one: {tokens: [1]}\n"
        "  page: {tokens: [1, 2, 3, 4]}\n"
        "  text: {text: Ahoy}\n"
        f"  key: {{key: {'ab' * 32}}}\n",
        name="policies.yaml",
    )
    assert [str(one) for one in short_prefixes(policies, 4)] == [
        "2:11: prefixes.short.tokens: no page is meant: it is 3 tokens, and a page 4",
        "3:9: prefixes.one.tokens: no page is meant: it is 1 token, and a page 4",
    ]
    (text,) = short_prefixes(policies, 1, lambda prefix: prefix.tokens or [], model="smollm2")
    assert str(text) == (
        "5:10: prefixes.text.text: no page is meant: it is 0 tokens, and a page 1 of 'smollm2'"
    )
    assert not short_prefixes(policies, 1)


def test_what_a_prompt_begins_with_is_found_out_before_a_step_asks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    named = {f"p{n}": NamedPrefix(tokens=[7, 7, n, n]) for n in range(100)}
    prefixes = Prefixes({**named, **{f"q{n}": NamedPrefix(tokens=[n, 8]) for n in range(100)}})
    prefixes.meet(MODELS[0], PAGE)
    sequences = [[7, 7, 5, 5, 9, 9], [7, 7, 500, 500], [500, 500, 7, 7]]
    root = tenant_root(MODELS[0], salt="mine")
    tokens_of = {name: list(one.tokens or ()) for name, one in prefixes.named.items()}
    for sequence in sequences:
        prefixes.expect(MODELS[0], root, packed_pages(sequence, PAGE))
    hashed = list[int]()

    def counted(parent: RootKey, contents: Sequence[bytes]) -> list[PageKey]:
        hashed.append(len(contents))
        return keys_after(parent, contents)

    monkeypatch.setattr(prefix_tree, "keys_after", counted)
    for sequence in sequences:
        for page in views(MODELS[0], "mine", sequence):
            assert prefixes.names_of(page) == expected(tokens_of, MODELS[0], "mine", page.key)
    assert sum(hashed) <= 1
