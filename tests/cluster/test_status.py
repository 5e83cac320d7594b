"""`pie status` prints what a router knows, readable at 80 columns."""

from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console

from pie.cluster import status as shown
from pie.cluster.sentences import printable
from pie.router.status import ClusterStatus, PlaceLine, RouterLine, WantedLine, WorkerLine

WORKER = WorkerLine(
    place="worker-0",
    address="",
    pages={"device": 58231},
    state="unreachable",
    running=128,
    waiting=1024,
    free_pages=2730,
    total_pages=12730,
    prefill_tokens_per_s=12777.4,
    counters={
        "cached_tokens_device": 81_234_567,
        "cached_tokens_pool": 1_236_000,
        "pages_stored": 99_999,
        "pages_store_dropped": 12,
        "pages_loaded": 123_456,
        "preemptions": 10_230,
        "failed": 3,
        "cached_tokens_host": 2_000_000,
        "cached_tokens_disk": 64,
        "pages_evicted": 400,
        "pages_lost": 5,
        "disk_bad_pages.checksum": 1,
        "disk_bad_pages.missing": 2,
    },
    gauges={"tier_used_bytes.host": 200 << 20, "tier_budget_bytes.host": 1 << 30},
)
NODE = PlaceLine(
    place="pool-0",
    address="",
    pages={"pool_ram": 60},
    state="draining",
    counters={
        "hits": 123_456,
        "misses": 7,
        "evicted": 1_000_000_000,
        "bad_pages.at_load": 1,
        "bad_pages.at_store": 2,
    },
    gauges={"used_bytes": 123 << 20, "budget_bytes": 1 << 40, "pages.pool_ram": 60_000},
)


def printed(monkeypatch: pytest.MonkeyPatch, status: ClusterStatus) -> list[str]:
    """Return the words of each line."""
    monkeypatch.setattr(shown, "fetch_status", lambda url, token, trust: status)
    file = io.StringIO()
    shown.show_status("http://127.0.0.1:8000", "", Console(file=file, width=80))
    lines = file.getvalue().splitlines()
    assert all(len(line) <= 80 for line in lines)
    return [" ".join(line.split()) for line in lines]


def test_what_places_count_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    status = ClusterStatus(model="m", index="ok", workers=[WORKER], pool=[NODE], ready=True)
    lines = printed(monkeypatch, status)
    assert "worker-0 unreachable 128 1024 2730/12730 58231 12777" in lines
    assert "worker cached tok from pool stored dropped loaded preempted failed" in lines
    assert "worker-0 81.2M 1.2M 99999 12 123k 10230 3" in lines
    assert "worker host of disk of host tok disk tok evicted lost bad" in lines
    assert "worker-0 200 MiB 1.0 GiB - - 2.0M 64 400 5 3" in lines
    assert "pool state used of pages hits misses evicted bad indexed" in lines
    assert "pool-0 draining 123 MiB 1.0 TiB 60000 123k 7 1.0G 3 60" in lines
    assert not any(line.startswith("why") for line in lines)


def test_policies_that_fail_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    failing: dict[str, int | float] = {
        "policy_failing.failures": 1_234_567,
        "policy_failing.fallbacks": 12,
        "policy_failing.unknown": 3,
    }
    quiet: dict[str, int | float] = {"policy_failing.failures": 0}
    workers = [msgspec.structs.replace(WORKER, gauges=gauges) for gauges in (failing, quiet)]
    # What policies did that are in force no more is in the counters alone.
    node = msgspec.structs.replace(
        NODE, gauges={"policy_failing.fallbacks": 1}, counters={"policy_failures": 5}
    )
    status = ClusterStatus(
        model="m", index="ok", workers=workers, pool=[node], ready=True, policy_failures=2
    )
    assert [line for line in printed(monkeypatch, status) if "policy" in line] == [
        "policies routing policy failed 2x, so `cost` chose",
        "policies worker-0's retention policy: failed 1.2Mx, `lru` completed 12 answers,",
        "policies pool-0's retention policy: `lru` completed 1 answers",
    ]


def test_tiers_of_a_node_and_the_state_of_its_bucket_are_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gauges: dict[str, int | float] = {
        "tier_used_bytes.pool_ram": 1 << 30,
        "tier_budget_bytes.pool_ram": 1 << 30,
        "tier_used_bytes.pool_object": 123 << 30,
        "tier_budget_bytes.pool_object": 1 << 40,
        "object_state.ok": 0,
        "object_state.read_only": 1,
    }
    counters: dict[str, int | float] = {"bad_pages.at_load": 2, "object_dropped_pages": 3}
    node = PlaceLine(
        place="pool-0", address="", pages={}, state="serving", gauges=gauges, counters=counters
    )
    status = ClusterStatus(model="m", index="ok", workers=[], pool=[node], ready=True)
    lines = printed(monkeypatch, status)
    assert "pool ram disk of bucket of state bad dropped" in lines
    assert "pool-0 1.0 GiB - - 123 GiB 1.0 TiB read_only 2 3" in lines


def test_a_place_that_said_nothing_has_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = WorkerLine(place="worker-1", address="", pages={}, state="silent")
    node = PlaceLine(place="pool-1", address="", pages={"pool_ram": 4}, state="silent")
    status = ClusterStatus(model="m", index="ok", workers=[worker], pool=[node], ready=True)
    lines = printed(monkeypatch, status)
    assert "worker-1 silent 0 0 0/0 0 0" in lines
    assert "pool-1 silent - - - - - - - 4" in lines
    assert not any("preempted" in line for line in lines)


def test_a_cluster_that_is_not_ready_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "No worker is connected; index: degraded."
    status = ClusterStatus(model="", index="degraded", workers=[], pool=[], reason=reason)
    assert f"why {reason}" in printed(monkeypatch, status)


def test_how_many_workers_are_wanted_is_shown_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = WantedLine(
        model="m", workers=1, wanted=4, reason="9.0 requests wait\x1b[2J", policy="by-load"
    )
    status = ClusterStatus(model="m", index="ok", workers=[], pool=[], wanted=[wanted])
    lines = printed(monkeypatch, status)
    assert "wanted m 4 workers, 1 is up: 9.0 requests wait\\x1b[2J" in lines


@pytest.mark.parametrize(
    ("routers", "together", "told"),
    [
        (["a"], "ok", ""),
        (["a", "b"], "ok", " of 2 routers"),
        (["router at [::1]:80"], "degraded", " of router at [::1]:80 alone"),
    ],
)
def test_whose_counts_are_shown_is_said(
    monkeypatch: pytest.MonkeyPatch, routers: list[str], together: str, told: str
) -> None:
    status = ClusterStatus(
        model="m",
        index="ok",
        workers=[],
        pool=[],
        requests=7,
        routers=[RouterLine(router=one) for one in routers],
        routers_together=together,
    )
    counts = f"hit rate 0.0% of 0 prompt tokens requests 7{told}"
    assert counts in " ".join(printed(monkeypatch, status))


def test_which_policies_each_router_runs_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    routers = [
        RouterLine(router="a", policy_version=2),
        RouterLine(router="b", policy_version=1, policy_refused=2),
    ]
    status = ClusterStatus(
        model="m", index="ok", workers=[], pool=[], routers=routers, policy_version=2
    )
    said = "policies version 1: b (did not take 2); version 2: a"
    assert said in printed(monkeypatch, status)
    alone = ClusterStatus(
        model="m", index="ok", workers=[], pool=[], routers=routers[:1], policy_version=2
    )
    assert "policies version 2: router" in printed(monkeypatch, alone)


def test_places_and_routers_are_shown_by_name_whoever_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workers = [msgspec.structs.replace(WORKER, place=f"worker-{one}") for one in (10, 2, 1)]
    routers = [RouterLine(router=one, policy_version=1) for one in ("b", "a")]
    status = ClusterStatus(
        model="m",
        index="ok",
        workers=workers,
        pool=[],
        routers=routers,
        policy_version=1,
        policy_file_differs="it differs",
    )
    lines = printed(monkeypatch, status)
    shown_first = [line.split()[0] for line in lines if line.startswith("worker-")][:3]
    assert shown_first == ["worker-1", "worker-2", "worker-10"]
    assert any(line.endswith("version 1: a, b") for line in lines)
    assert "policies it differs" in lines
    refused = msgspec.structs.replace(status, policy_edit_refused="it is bad")
    lines = printed(monkeypatch, refused)
    assert "policies it is bad" in lines
    assert "policies it differs" not in lines, "what is refused cannot be applied"


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (0, "0"),
        (99_999, "99999"),
        (100_000, "100k"),
        (999_600, "1.0M"),
        (4_540_000, "4.5M"),
        (12e12, "12000G"),
    ],
)
def test_counts_are_short(number: float, told: str) -> None:
    assert shown.short(number) == told


def test_what_others_wrote_is_one_line_of_a_terminal() -> None:
    assert (
        printable("\x1b[31mred\nversion 9\x07 \ud800 ü")
        == "\\x1b[31mred\\nversion 9\\x07 \\ud800 ü"
    )
