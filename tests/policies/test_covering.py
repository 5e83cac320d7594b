"""Rules that earlier ones leave nothing to: known where that is certain, and never said where a page is left."""

import itertools

import pytest
from hypothesis import given, strategies as st

from pie.page.events import Part, Tier
from pie.policies.prefixes import NamedPrefix
from pie.policies.retention import PageView
from pie.policies.rules import Selector, covering
from tests.policies.pages import key


@pytest.mark.parametrize(
    ("first", "second", "covers"),
    [
        (Selector(), Selector(tenant="a"), True),
        (Selector(tenant="a*"), Selector(tenant="ab"), True),
        (Selector(tenant="a*"), Selector(tenant="*b"), False),
        (Selector(tenant="a*"), Selector(tenant="ab*"), True),
        (Selector(tenant="a*"), Selector(tenant="a?"), True),
        (Selector(tenant="ab*"), Selector(tenant="a*"), False),
        (Selector(tenant="ab*"), Selector(tenant="a?c*"), False),
        (Selector(tenant="a?*"), Selector(tenant="a*"), False),
        (Selector(tenant="a[bc]*"), Selector(tenant="ab*"), False),
        (Selector(tenant="a*"), Selector(tenant="[ab]c"), False),
        (Selector(session="?*"), Selector(session="8f*"), True),
        (Selector(session="?*"), Selector(session="*"), False),
        (Selector(tenant="a"), Selector(), False),
        (Selector(tier=["disk", "host"]), Selector(tier=["disk"]), True),
        (Selector(tier=["disk"]), Selector(tier=["disk", "host"]), False),
        (Selector(hits=3), Selector(), False),
        (Selector(hits=3), Selector(hits=4), True),
        (Selector(part=["state"]), Selector(tier=["disk"]), False),
        (Selector(session="?*"), Selector(session="ab"), True),
        (Selector(session="?*"), Selector(), False),
        (Selector(age=5.0), Selector(age=4.0), False),
        (Selector(age=5.0), Selector(age=5.0, hits=1), True),
        (Selector(model="a"), Selector(model="b"), False),
    ],
)
def test_a_rule_that_leaves_nothing_to_another_is_known(
    first: Selector, second: Selector, covers: bool
) -> None:
    assert first.covers(second) is covers


def test_rules_take_all_of_another_one_or_together() -> None:
    prefixes = {
        "short": NamedPrefix(tokens=[1, 2]),
        "long": NamedPrefix(tokens=[1, 2, 3]),
        "desk": NamedPrefix(text="desk"),
        "same": NamedPrefix(text="desk"),
        "last": NamedPrefix(key="ab" * 32),
    }

    def takers(rule: Selector, *earlier: Selector) -> list[int]:
        return covering(earlier, rule, prefixes)

    assert takers(Selector(prefix="short"), Selector(prefix="long")) == [0]
    assert not takers(Selector(prefix="long"), Selector(prefix="short"))
    assert takers(Selector(prefix="same", hits=3), Selector(prefix="desk")) == [0]
    assert takers(Selector(prefix="last"), Selector(prefix="ab" * 32)) == [0]
    assert takers(Selector(prefix="ab" * 32), Selector(prefix="last")) == [0]
    assert not takers(Selector(), Selector(prefix="desk"))
    near, far = Selector(tier=["device", "host"]), Selector(tier=["disk", "pool-ram"], hits=2)
    pool = Selector(tier=["pool-disk", "pool-object"])
    assert takers(Selector(hits=2, age=5.0), near, Selector(tenant="a"), far, pool) == [0, 2, 3]
    assert not takers(Selector(hits=1), near, far, pool), "the disk's rule is for two uses"
    assert takers(Selector(hits=1, tier=["host"]), near, far, pool) == [0]
    assert takers(Selector(tier=["disk"], part=["state"], hits=2), near, far) == [1]


_words = st.none() | st.sampled_from(
    ["", "a", "ab", "a*", "?*", "*b", "a?", "*", "[ab]", "b[", "**"]
)
_selectors = st.builds(
    Selector,
    tenant=_words,
    tier=st.none() | st.lists(st.sampled_from(["device", "host"]), min_size=1),
    part=st.none() | st.lists(st.sampled_from(["full", "window", "state"]), min_size=1),
    hits=st.none() | st.integers(1, 3),
    age=st.none() | st.sampled_from([1.0, 2.0]),
)


@given(st.lists(_selectors, max_size=4), _selectors)
def test_no_page_is_left_to_a_rule_that_is_said_to_be_taken(
    earlier: list[Selector], rule: Selector
) -> None:
    takers = [earlier[n] for n in covering(earlier, rule, {})]
    if not takers:
        return
    for tag, part, tier in itertools.product(("", "a", "ab", "b", "b[", "aab"), Part, Tier):
        one = PageView(key(1), b"", 0, part, tier, 1, tag)
        if rule.matches(one):
            # At the rule's own number of uses and age: where these are more, the others match as well.
            assert any(
                taker.matches(one) and taker.hits <= rule.hits and taker.age_s <= rule.age_s
                for taker in takers
            )
