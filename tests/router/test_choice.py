"""What a candidate is said to hold, and a policy that fails."""

import asyncio
from array import array
from collections.abc import Sequence
from typing import Any

import pytest

from pie.index.contract import PlaceRecord
from pie.index.mirror import Mirror
from pie.page.events import (
    Epoch,
    PageEntry,
    PageStored,
    Part,
    PartMask,
    PlaceId,
    PlaceKind,
    Tier,
    part_bit,
)
from pie.page.key import PageKey, RootKey, page_keys, tenant_root
from pie.policies.routing import Choice, RequestView, RoutingPolicy, WorkerView
from pie.policies.routing_cost import CostRouting
from pie.router.choice import Chooser
from pie.router.link import WorkerLink
from pie.router.metrics import RouterMetrics
from pie.router.prefix import Prefix
from pie.router.runs import Held, held_pages, in_the_making

PAGE = 4
ROOT = RootKey(bytes(32))
TOKENS = array("I", range(10 * PAGE))
DEVICE, HOST, DISK, RAM = (
    part_bit(Part.FULL, tier) for tier in (Tier.DEVICE, Tier.HOST, Tier.DISK, Tier.POOL_RAM)
)


def record(place: str, kind: PlaceKind = PlaceKind.WORKER, **fields: Any) -> PlaceRecord:
    values: dict[str, Any] = {
        "place": PlaceId(place),
        "epoch": Epoch(1),
        "kind": kind,
        "address": "tcp://127.0.0.1:1",
        "model_root": ROOT if kind is PlaceKind.WORKER else None,
        "page_tokens": PAGE,
        "context_tokens": 1000,
    }
    return PlaceRecord(**(values | fields))


def held(own: Sequence[int], pool: Sequence[int] = (), **fields: Any) -> Held:
    def segments(masks: Sequence[int]) -> list[tuple[PartMask, int]]:
        return [(PartMask(mask), 1) for mask in masks]

    return held_pages(segments(own), segments(pool), record("w", **fields))


@pytest.mark.parametrize(
    ("own", "pool", "expected"),
    [
        ([], [], Held(0, {})),
        ([DEVICE] * 3, [], Held(3, {})),
        ([DEVICE, DEVICE | HOST, HOST, DISK], [], Held(2, {"host": 1, "disk": 1})),
        ([DEVICE], [RAM] * 3, Held(1, {"pool": 2})),
        ([], [RAM] * 2, Held(0, {"pool": 2})),
        ([HOST, DEVICE], [RAM] * 2, Held(1, {"host": 1})),
    ],
)
def test_pages_count_where_they_are_nearest(
    own: list[int], pool: list[int], expected: Held
) -> None:
    assert held(own, pool) == expected


def test_a_window_must_be_held_where_it_ends() -> None:
    window = part_bit(Part.WINDOW, Tier.DEVICE)
    parts = (Part.FULL, Part.WINDOW)
    own = [DEVICE, DEVICE | window, DEVICE | window, DEVICE]
    assert held(own, parts=parts, window_tokens=2 * PAGE).pages == 3
    assert held(own[:2], parts=parts, window_tokens=2 * PAGE).pages == 0


def test_a_recurrent_models_run_ends_at_its_last_snapshot() -> None:
    state = part_bit(Part.STATE, Tier.DEVICE)
    hybrid = (int(Part.FULL), int(Part.STATE))
    assert held([DEVICE, DEVICE | state, DEVICE], parts=hybrid) == Held(2, {})
    assert held([DEVICE, DEVICE, DEVICE], parts=hybrid) == Held(0, {})


def test_of_a_model_without_attention_the_last_snapshot_counts_where_it_is() -> None:
    device, host, ram = (
        part_bit(Part.STATE, tier) for tier in (Tier.DEVICE, Tier.HOST, Tier.POOL_RAM)
    )
    parts = (int(Part.STATE),)
    assert held([0, device, 0, device], parts=parts) == Held(4, {})
    assert held([0, device, 0, host], parts=parts) == Held(2, {"host": 2})
    assert held([0, device], [0, ram, 0, ram, 0], parts=parts) == Held(2, {"pool": 2})
    assert held([0, 0, device], [ram, ram], parts=parts) == Held(3, {})
    assert held([], parts=parts) == Held(0, {})


def test_pages_in_the_making_count_as_held() -> None:
    assert in_the_making(Held(1, {"pool": 3}), 3) == Held(3, {"pool": 1})
    assert in_the_making(Held(1, {"pool": 3}), 5) == Held(5, {})
    assert in_the_making(Held(2, {}), 1) == Held(2, {})


class Fleet:
    """Two workers and a mirror, without connections."""

    def __init__(self, policy: RoutingPolicy | None = None) -> None:
        self.mirror = Mirror()
        self.metrics = RouterMetrics()
        self.links = [WorkerLink(record("w0")), WorkerLink(record("w1"))]
        self.chooser = Chooser(self.mirror, policy, self.metrics)
        for link in self.links:
            self.mirror.place_up(link.record)

    def store(self, place: str, tier: Tier, pages: slice, *, salt: str | None = None) -> None:
        keys = page_keys(tenant_root(ROOT, salt=salt), TOKENS, PAGE)
        entries = tuple(
            PageEntry(key, b"", index, Part.FULL, tier, 1)
            for index, key in list(enumerate(keys))[pages]
        )
        self.mirror.apply(PageStored(PlaceId(place), Epoch(1), 1, entries))

    def choose(self, salt: str | None = None, session: str | None = None) -> tuple[str, int]:
        chosen = self.chooser.choose("r", Prefix(TOKENS, salt), self.links, session=session)
        return chosen.link.record.place, chosen.predicted_tokens


def test_the_worker_that_holds_the_prefix_is_chosen() -> None:
    fleet = Fleet()
    fleet.store("w1", Tier.DEVICE, slice(5))
    assert fleet.choose() == ("w1", 5 * PAGE)


def test_a_salt_keeps_tenants_apart() -> None:
    fleet = Fleet()
    fleet.store("w1", Tier.DEVICE, slice(5), salt="a")
    assert fleet.choose("a") == ("w1", 5 * PAGE)
    assert fleet.choose("b")[1] == 0
    assert fleet.choose()[1] == 0


def test_a_fully_held_prompt_still_computes_its_last_token() -> None:
    fleet = Fleet()
    fleet.store("w0", Tier.DEVICE, slice(10))
    assert fleet.choose() == ("w0", len(TOKENS) - 1)


def test_a_run_goes_on_at_another_pool_node() -> None:
    fleet = Fleet()
    fleet.mirror.place_up(record("p0", PlaceKind.POOL))
    fleet.mirror.place_up(record("p1", PlaceKind.POOL))
    fleet.store("p0", Tier.POOL_RAM, slice(4))
    fleet.store("p1", Tier.POOL_RAM, slice(4, 9))
    assert fleet.choose()[1] == 9 * PAGE


def test_the_pool_may_go_on_where_a_worker_ends() -> None:
    fleet = Fleet()
    fleet.mirror.place_up(record("p0", PlaceKind.POOL))
    fleet.mirror.place_up(record("p1", PlaceKind.POOL))
    fleet.store("w1", Tier.DEVICE, slice(3))
    fleet.store("p0", Tier.POOL_RAM, slice(3, 5))
    fleet.store("p1", Tier.POOL_RAM, slice(5, 9))
    assert fleet.choose() == ("w1", 9 * PAGE)


def test_a_prefix_in_the_making_draws_the_next_request() -> None:
    fleet = Fleet()
    fleet.links[1].inflight_keys.update(page_keys(ROOT, TOKENS, PAGE)[:6])
    assert fleet.choose() == ("w1", 6 * PAGE)


@pytest.mark.parametrize(("sharing", "hot_pages"), [(7, 0), (8, 6)])
def test_pages_that_many_requests_share_now_are_hot(sharing: int, hot_pages: int) -> None:
    seen: list[int] = []

    class Watching(CostRouting):
        def choose(self, request: RequestView, workers: Sequence[WorkerView]) -> Choice:
            seen.append(request.hot_tokens)
            return super().choose(request, workers)

    fleet = Fleet(Watching())
    for number in range(sharing):
        fleet.links[number % 2].inflight_keys.update(page_keys(ROOT, TOKENS, PAGE)[:6])
    fleet.choose()
    assert seen == [hot_pages * PAGE]


def test_a_prompt_without_a_full_page_goes_by_load() -> None:
    fleet = Fleet()
    chosen = fleet.chooser.choose("r", Prefix(TOKENS[:2]), fleet.links, session=None)
    assert chosen.predicted_tokens == 0
    assert list(chosen.keys) == []


def test_keys_are_made_once_for_all_choices_of_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    made = 0

    def counted(*args: Any) -> list[PageKey]:
        nonlocal made
        keys = page_keys(*args)
        made += len(keys)
        return keys

    monkeypatch.setattr("pie.router.prefix.page_keys", counted)
    fleet = Fleet()
    prefix = Prefix(TOKENS)
    chosen = [fleet.chooser.choose("r", prefix, fleet.links, session=None) for _ in range(5)]
    assert made == len(chosen[0].keys) == 10
    # A resumed stream needs the keys of its output alone.
    longer = prefix.longer(array("I", range(2 * PAGE)))
    keys = fleet.chooser.choose("r", longer, fleet.links, session=None).keys
    assert made == len(keys) == 12
    assert keys == page_keys(ROOT, longer.ids, PAGE)
    assert prefix.packed is prefix.packed


def test_a_prompt_that_ends_inside_a_page_goes_on_there() -> None:
    prefix = Prefix(TOKENS[: 2 * PAGE + 1], "salt")
    longer = prefix.longer(TOKENS[2 * PAGE + 1 : 5 * PAGE])
    expected = page_keys(tenant_root(ROOT, salt="salt"), TOKENS, PAGE)[:5]
    assert list(longer.keys(ROOT, PAGE)) == expected
    assert list(Prefix(TOKENS[:1]).longer(TOKENS[1:]).keys(ROOT, PAGE)) == page_keys(
        ROOT, TOKENS, PAGE
    )


def test_a_long_run_over_many_pool_nodes_is_followed_in_linear_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = Fleet()
    pages, group = 6400, 32
    tokens = array("I", range(pages * PAGE))
    keys = page_keys(ROOT, tokens, PAGE)
    for node in range(2):
        fleet.mirror.place_up(record(f"p{node}", PlaceKind.POOL))
        entries = tuple(
            PageEntry(key, b"", index, Part.FULL, Tier.POOL_RAM, 1)
            for index, key in enumerate(keys[:-100])
            if index // group % 2 == node
        )
        fleet.mirror.apply(PageStored(PlaceId(f"p{node}"), Epoch(1), 1, entries))
    asked: list[int] = []
    matches = fleet.mirror.matches

    def counted(wanted: Sequence[PageKey]) -> Any:
        asked.append(len(wanted))
        return matches(wanted)

    monkeypatch.setattr(fleet.mirror, "matches", counted)
    chosen = fleet.chooser.choose("r", Prefix(tokens), fleet.links, session=None)
    assert chosen.predicted_tokens == (pages - 100) * PAGE
    assert sum(asked) <= 4 * pages


@pytest.mark.parametrize("node_pages", [1, 31, 32, 64, 65, 128, 500])
def test_a_run_is_followed_to_its_end_however_it_is_spread(node_pages: int) -> None:
    fleet = Fleet()
    pages = 700
    tokens = array("I", range(pages * PAGE))
    for node in range(3):
        fleet.mirror.place_up(record(f"p{node}", PlaceKind.POOL))
        entries = tuple(
            PageEntry(key, b"", index, Part.FULL, Tier.POOL_RAM, 1)
            for index, key in enumerate(page_keys(ROOT, tokens, PAGE)[:-3])
            if index // node_pages % 3 == node
        )
        fleet.mirror.apply(PageStored(PlaceId(f"p{node}"), Epoch(1), 1, entries))
    chosen = fleet.chooser.choose("r", Prefix(tokens), fleet.links, session=None)
    assert chosen.predicted_tokens == (pages - 3) * PAGE


class Raising:
    """A policy that fails."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def choose(self, request: RequestView, workers: Sequence[WorkerView]) -> Choice:
        raise self._error


class Absent:
    """A policy that chooses nobody."""

    def choose(self, request: RequestView, workers: Sequence[WorkerView]) -> Choice:
        return Choice(PlaceId("elsewhere"), ())


@pytest.mark.parametrize(
    "policy",
    [
        Raising(RuntimeError("no")),
        Raising(SystemExit(3)),
        Raising(asyncio.CancelledError()),
        Absent(),
    ],
)
def test_the_built_in_answers_for_a_policy_that_fails(policy: RoutingPolicy) -> None:
    fleet = Fleet(policy)
    fleet.store("w1", Tier.DEVICE, slice(5))
    assert fleet.choose() == ("w1", 5 * PAGE)
    assert fleet.metrics.total(fleet.metrics.policy_failures) == 1


def test_a_policy_decides() -> None:
    class Last:
        def choose(self, request: RequestView, workers: Sequence[WorkerView]) -> Choice:
            return Choice(workers[-1].place, ())

    assert Fleet(Last()).choose()[0] == "w1"
