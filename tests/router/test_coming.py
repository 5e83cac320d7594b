"""A prefix that one worker computes is waited for elsewhere when that is the better estimate."""

from array import array

from pie.index.mirror import Mirror
from pie.page.events import PlaceId, PlaceKind
from pie.page.key import page_keys
from pie.policies.routing import Choice, RequestView, WorkerView
from pie.policies.routing_cost import CostRouting
from pie.router.books import Running, WorkerBooks
from pie.router.choice import Chooser, Chosen
from pie.router.coming import longest_wait_s
from pie.router.metrics import RouterMetrics
from pie.router.prefix import Prefix
from tests.router.test_books import Sink, first_token
from tests.router.test_choice import PAGE, ROOT, record

TOKENS = array("I", range(1_000 * PAGE))
"""By the guess, 4 s of prefill, and 0.2 s of load."""
PAGES = len(TOKENS) // PAGE
KEYS = page_keys(ROOT, TOKENS, PAGE)


class Burst:
    """Workers with a pool behind them; what is chosen is entered in their books."""

    def __init__(self, workers: int = 2, *, pool: bool = True, to: str | None = None) -> None:
        self.mirror = Mirror()
        self.now_s = 100.0
        self.links = [
            WorkerBooks(record(f"w{n}"), clock=lambda: self.now_s) for n in range(workers)
        ]
        for link in self.links:
            self.mirror.place_up(link.record)
        if pool:
            self.mirror.place_up(record("p0", PlaceKind.POOL))
        self.policy = _Fixed()
        self.chooser = Chooser(
            self.mirror, None if to is None else self.policy, RouterMetrics(), awaits=True
        )
        self.count = 0

    def ask(self, tail: int = 1, *, to: str = "") -> Chosen[WorkerBooks]:
        """Send a request for the prefix with `tail` tokens of its own behind it."""
        self.policy.place = PlaceId(to)
        self.count += 1
        prefix = Prefix(TOKENS + array("I", [50_000 + self.count] * tail))
        chosen = self.chooser.choose(f"r{self.count}", prefix, self.links, session=None)
        keys, later = chosen.keys, chosen.keys[:0]
        if chosen.awaited_pages:
            keys, later = keys[: chosen.held_pages], keys[chosen.held_pages :]
        new = len(prefix.ids) - max(chosen.predicted_tokens, chosen.awaited_pages * PAGE)
        running = Running(Sink(), keys, new, len(prefix.ids), later_keys=later)
        chosen.link.sent(f"r{self.count}", running)
        return chosen


class _Fixed:
    """Sends everything to one place."""

    place = PlaceId("")

    def choose(self, request: RequestView, workers: object) -> Choice:
        return Choice(self.place)


def test_a_burst_goes_together_and_those_sent_elsewhere_wait() -> None:
    burst = Burst()
    first = burst.ask()
    assert first.awaited_pages == 0
    again = burst.ask(tail=10)
    assert (again.link, again.awaited_pages) == (first.link, 0), "there it is in the making"
    elsewhere: Chosen[WorkerBooks] | None = None
    for _ in range(20):
        elsewhere = burst.ask(tail=200)
        if elsewhere.link is not first.link:
            break
    assert elsewhere is not None
    assert elsewhere.link is not first.link, "the queue for the tails grew longer than a load"
    assert elsewhere.awaited_pages == PAGES
    assert 4.0 < elsewhere.await_s <= 8.1
    made_at = [link for link in burst.links if link.tokens_until(KEYS[-1], PAGES - 1) is not None]
    assert made_at == [first.link], "it is computed once"


def test_whoever_follows_to_the_same_worker_waits_too() -> None:
    burst = Burst(to="")
    burst.ask(to="w0")
    for _ in range(3):
        assert burst.ask(to="w1").awaited_pages == PAGES
    assert burst.links[1].queued_tokens < 10, "what it waits for it does not compute"


def test_a_worker_that_has_got_them_has_them() -> None:
    burst = Burst(to="")
    burst.ask(to="w0")
    burst.ask(to="w1")
    burst.links[1].told(first_token("r2"))
    third = burst.ask(to="w1")
    assert (third.awaited_pages, third.predicted_tokens) == (0, PAGES * PAGE)
    burst.links[1].ended("r2")
    burst.links[1].ended("r3")
    assert not burst.links[1].inflight_keys


def test_what_was_computed_a_moment_ago_is_on_its_way() -> None:
    burst = Burst(to="")
    burst.ask(to="w0")
    burst.links[0].told(first_token("r1"))
    burst.now_s += 0.4
    soon = burst.ask(to="w1")
    assert (soon.awaited_pages, soon.await_s) == (PAGES, 0.25)
    burst.links[1].ended("r2")
    burst.now_s += 0.2
    assert burst.ask(to="w1").awaited_pages == 0, "else the pool would have them"


def test_nobody_waits_for_what_is_far_off() -> None:
    burst = Burst(to="")
    burst.ask(to="w0", tail=40_000)
    chosen = burst.ask(to="w1")
    assert chosen.awaited_pages == 0
    # A tenth of it is left when the first has been at it for 40 s.
    burst.links[1].ended("r2")
    burst.now_s += 40.0
    assert burst.ask(to="w1").awaited_pages == PAGES


def test_without_a_pool_or_where_nobody_computes_it_there_is_nothing_to_wait_for() -> None:
    burst = Burst(pool=False, to="")
    burst.ask(to="w0")
    assert burst.ask(to="w1").awaited_pages == 0
    burst = Burst(to="")
    burst.ask(to="w0")
    burst.links[0].ended("r1")
    assert burst.ask(to="w1").awaited_pages == 0


def test_a_wait_is_bounded_by_what_made_it_worth_it() -> None:
    assert longest_wait_s(coming_ms=1_000, compute_ms=5_000) == 2.0
    assert longest_wait_s(coming_ms=1_000, compute_ms=700) == 1.4
    assert longest_wait_s(coming_ms=0, compute_ms=700) == 0.25
    assert longest_wait_s(coming_ms=0, compute_ms=10) == 0.02


def test_the_cost_of_a_wait_is_the_wait_and_the_load() -> None:
    worker = WorkerView(
        PlaceId("w"),
        device_tokens=0,
        prefill_tokens_per_s=1_000,
        load_tokens_per_s={"pool": 10_000},
        coming_tokens=900,
        coming_ms=500,
    )
    cost = CostRouting().cost(RequestView("r", 1_000, 16), worker)
    assert (cost.wait_ms, cost.load_ms, cost.prefill_ms) == (500, 90, 100)
