"""Which set of policies did best."""

import msgspec
import pytest

from pie.simulator.ordered import notes
from pie.simulator.plots import html_page
from pie.simulator.report import Report, Times, report_of
from pie.simulator.verdict import verdict
from tests.simulator.parts import ask, cluster

NOTHING_LEFT = "no page left device memory"


@pytest.fixture(scope="module")
def some() -> Report:
    simulated = cluster()
    simulated.run_open([ask(at * 0.1, (1, 20), (at, 4)) for at in range(2, 6)])
    return report_of("x", simulated, policies={"retention": "lru", "scale": "fixed"})


def of(
    some: Report, name: str, mean: float, hits: float, *, p99: float = 9.0, refused: int = 0
) -> Report:
    times = Times(mean, mean, mean, p99)
    fields = {"name": name, "ttft_s": times, "hit_rate": hits, "refused": refused}
    return msgspec.structs.replace(some, **fields, evicted_pages={"device": 3})


def test_the_quickest_is_named_with_the_next_one_and_what_that_saves(some: Report) -> None:
    (told,) = verdict([of(some, "a", 2.0, 0.3), of(some, "b", 1.0, 0.4), of(some, "c", 4.0, 0.1)])
    assert told == (
        "`b` is the quickest: a first token after 1.000 s on average, hit rate 0.4000; "
        "`a`, which is next, takes 2.000 s (50% is saved)"
    )


def test_who_is_better_at_something_else_is_told(some: Report) -> None:
    told = verdict([of(some, "a", 1.0, 0.3), of(some, "b", 2.0, 0.4, p99=3.0)])
    assert told[1:] == [
        "`b` computes least: hit rate 0.4000",
        "`b` has the shortest of long waits: p99 3.000 s",
    ]


def test_what_differs_by_little_is_alike(some: Report) -> None:
    (told,) = verdict([of(some, "a", 1.0, 0.3), of(some, "b", 1.005, 0.3)])
    assert told.startswith("`a` and `b` are alike: a first token after 1.000 s on average")
    assert verdict([some, some])[1].startswith(NOTHING_LEFT)
    assert verdict([some]) == []


def test_who_refused_more_is_not_the_quickest(some: Report) -> None:
    told = verdict([of(some, "a", 1.0, 0.3, refused=9), of(some, "b", 2.0, 0.3, refused=2)])
    assert told[0] == "`a` refused 9 requests, 7 more than others"
    assert told[1].startswith("`b` is the quickest")


def test_nobody_is_the_quickest_where_no_request_was_answered(some: Report) -> None:
    assert len(verdict([of(some, "a", 0.0, 0.0), of(some, "b", 0.0, 0.0)])) == 1


def test_the_page_tells_it_with_the_policies_in_which_the_sets_differ(some: Report) -> None:
    other = {"retention": "mine:<Own>, keep: 3", "scale": "fixed"}
    both = [of(some, "a", 1.0, 0.3), msgspec.structs.replace(of(some, "b", 2.0, 0), policies=other)]
    page = html_page("t", both, "2 workers")
    assert "<p>2 workers</p>" in page
    assert '<p class="verdict">`a` is the quickest' in page
    assert '<td class="words">mine:&lt;Own&gt;, keep: 3</td>' in page
    assert "fixed" not in page


def test_what_is_said_of_each_is_said_once() -> None:
    said = [("a", ["x", "y"]), ("b", ["x"]), ("c", ["x", "y"])]
    assert notes(said, "not ") == ["all: not x", "a, c: not y"]
    assert notes([("a", ["x"])]) == ["a: x"]
