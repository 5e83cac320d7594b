"""Of many workers a policy is shown a few, and chooses as if it were shown all."""

from array import array
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from pie.index.mirror import Mirror
from pie.page.events import Epoch, PageEntry, PageStored, Part, PlaceId, PlaceKind, Tier
from pie.page.key import page_keys
from pie.policies.registry import BUILTIN, PolicyKind
from pie.policies.routing import RoutingPolicy
from pie.policies.routing_cost import CostRouting
from pie.policies.routing_plain import LeastLoadedRouting
from pie.policies.shortlist import Shortlisting
from pie.router import shortlist
from pie.router.books import Running, WorkerBooks
from pie.router.choice import Chooser, Chosen
from pie.router.metrics import RouterMetrics
from pie.router.prefix import Prefix
from pie.wire.messages import CachedTokens, FinishReason, Load, Started, TokenDelta
from tests.router.test_choice import PAGE, ROOT, record

PROMPTS = [array("I", [1] * (2 * PAGE) + [other] * (4 * PAGE)) for other in (1, 2, 3)]
"""All begin with the same two pages."""
FEWEST = 8
POLICIES: dict[str, Callable[[], RoutingPolicy]] = {
    "cost": CostRouting,
    "cost without weights": lambda: CostRouting(miss_weight=1, decode_share=0, session_share=0),
    "least-loaded": LeastLoadedRouting,
}


class Sink:
    """Takes no notice."""

    def on_delta(self, delta: TokenDelta) -> None:
        """Take new tokens."""

    def on_refused(self, refused: Any) -> None:
        """Take a refusal."""

    def on_gone(self) -> None:
        """Take an end."""


class Cluster:
    """Workers and pool nodes, whose books a test writes."""

    def __init__(self, workers: int, nodes: int) -> None:
        self.now_s = 100.0
        self.mirror = Mirror()
        self.seqs: dict[str, int] = {}
        self.books = []
        for number in range(max(workers, nodes)):
            if number < nodes:
                self.mirror.place_up(record(f"n{number}", PlaceKind.POOL))
            if number < workers:
                self.books.append(WorkerBooks(record(f"w{number}"), clock=lambda: self.now_s))
                self.mirror.place_up(self.books[-1].record)
        self.requests = 0

    def store(self, place: str, tier: Tier, prompt: int, pages: int) -> None:
        keys = page_keys(ROOT, PROMPTS[prompt], PAGE)[:pages]
        entries = tuple(PageEntry(key, b"", at, Part.FULL, tier, 1) for at, key in enumerate(keys))
        seq = self.seqs[place] = self.seqs.get(place, 0) + 1
        self.mirror.apply(PageStored(PlaceId(place), Epoch(1), seq, entries))

    def send(self, worker: int, prompt: int, pages: int) -> str:
        self.requests += 1
        keys = page_keys(ROOT, PROMPTS[prompt], PAGE)
        running = Running(Sink(), keys[:pages], 7, 24, later_keys=keys[pages:])
        self.books[worker].sent(str(self.requests), running)
        return str(self.requests)

    def tell(self, worker: int, request: str, *, ms: float, is_last: bool) -> None:
        started = Started(CachedTokens(0, 0, 0, 0), 1.0, ms / 4, ms)
        reason = FinishReason.LENGTH if is_last else None
        self.books[worker].told(TokenDelta(request, (1,), "", reason, started=started))


events = st.lists(
    st.one_of(
        st.tuples(st.just("store"), st.integers(0, 15), st.sampled_from([Tier.DEVICE, Tier.HOST]), st.integers(0, 2), st.integers(1, 6)),
        st.tuples(st.just("pool"), st.integers(0, 1), st.integers(0, 2), st.integers(1, 6)),
        st.tuples(st.just("send"), st.integers(0, 15), st.integers(0, 2), st.integers(0, 6)),
        st.tuples(st.just("tell"), st.integers(0, 15), st.sampled_from([50.0, 55.0, 900.0]), st.booleans()),
        st.tuples(st.just("load"), st.integers(0, 15), st.integers(0, 3), st.sampled_from([0, 24, 31]), st.sampled_from([0.0, 20.0])),
        st.tuples(st.just("later"), st.sampled_from([0.01, 0.3, 4.0])),
        st.tuples(st.just("ask"), st.integers(0, 2), st.sampled_from([None, "a", "b"])),
    ),
    max_size=40,
)  # fmt: skip


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=40)
@given(events=events, nodes=st.integers(0, 2), awaits=st.booleans())
def test_the_choice_from_the_shortlist_is_the_choice_from_all(
    name: str, events: list[tuple[Any, ...]], nodes: int, awaits: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pie.router.choice.MANY", FEWEST)
        cluster = Cluster(16, nodes)
        few, every = (
            Chooser(
                cluster.mirror,
                POLICIES[name](),
                RouterMetrics(),
                awaits=awaits,
                clock=lambda: cluster.now_s,
            )
            for _ in range(2)
        )
        every._shortlister = None
        asked: dict[int, list[str]] = {}
        for number, event in enumerate([("ask", 0, None), *events, ("ask", 1, "a")]):
            match event:
                case "store", worker, tier, prompt, pages:
                    cluster.store(f"w{worker}", tier, prompt, pages)
                case "pool", node, prompt, pages if node < nodes:
                    cluster.store(f"n{node}", Tier.POOL_RAM, prompt, pages)
                case "send", worker, prompt, pages:
                    asked.setdefault(worker, []).append(cluster.send(worker, prompt, pages))
                case "tell", worker, ms, is_last if asked.get(worker):
                    request = asked[worker].pop(0) if is_last else asked[worker][0]
                    cluster.tell(worker, request, ms=ms, is_last=is_last)
                case "load", worker, running, tokens, step_ms:
                    load = Load(running, running, tokens, 5, 10, 1000.0, step_ms)
                    cluster.books[worker].told_load(load)
                case "later", seconds:
                    cluster.now_s += seconds
                case "ask", prompt, session:
                    first, second = (
                        one.choose(
                            str(number), Prefix(PROMPTS[prompt]), cluster.books, session=session
                        )
                        for one in (few, every)
                    )
                    _same(first, second)
        assert few._shortlister is not None
        for followed in few._shortlister._fleets:
            followed.fleet.check()
        cluster.mirror.check()


def _same(few: Chosen[WorkerBooks], every: Chosen[WorkerBooks]) -> None:
    assert few.link is every.link
    assert few.predicted_tokens == every.predicted_tokens
    assert (few.awaited_pages, few.await_s) == (every.awaited_pages, every.await_s)
    assert few.held_pages == every.held_pages
    costs = {cost.place: cost for cost in every.choice.costs}
    assert all(cost == costs[cost.place] for cost in few.choice.costs)
    assert few.workers == every.workers == 16
    # What somebody else has is shown, or another worker that has as much.
    assert _most_elsewhere(few) == _most_elsewhere(every)


def _most_elsewhere(chosen: Chosen[WorkerBooks]) -> int:
    place = chosen.link.record.place
    return max(
        view.device_tokens + sum(tokens for tier, tokens in view.loads.items() if tier != "pool")
        for view in chosen.views
        if view.place != place
    )


def test_many_workers_that_hold_alike_are_few_to_a_policy() -> None:
    cluster = Cluster(100, 0)
    for worker in range(100):
        cluster.store(f"w{worker}", Tier.DEVICE, 0, 2)
    cluster.store("w7", Tier.DEVICE, 1, 6)
    chooser = Chooser(cluster.mirror, None, RouterMetrics(), clock=lambda: cluster.now_s)
    chosen = chooser.choose("r", Prefix(PROMPTS[1]), cluster.books, session=None)
    assert chosen.link is cluster.books[7]
    assert len(chosen.views) == 3
    assert chosen.workers == 100


def test_which_policies_are_shown_a_few() -> None:
    shortlisting = {
        name for name, kind in BUILTIN[PolicyKind.ROUTING].items() if issubclass(kind, Shortlisting)
    }
    assert shortlisting == {"cost", "least-loaded"}
    assert shortlist.MANY > FEWEST
