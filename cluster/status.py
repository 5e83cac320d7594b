"""`pie status`: what a running cluster says of itself.

Covers asking a router and printing its answer. Does not cover what is counted
(`pie.router.status`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import msgspec
from rich.console import Console
from rich.table import Table

from pie.cluster.asking import Trust, ask_router
from pie.cluster.errors import NotRunningError
from pie.cluster.printing import new_table
from pie.cluster.sentences import printable
from pie.router.settings import RouterSettings
from pie.router.status import ClusterStatus, PlaceLine, WorkerLine

_TIMEOUT_S = 5.0


def router_url(settings: RouterSettings, at: str | None) -> str:
    """Return where a router is: at `at`, or where the configuration lets it listen.

    Raises:
        NotRunningError: Neither says.
    """
    if at:
        return at.rstrip("/")
    if not settings.port:
        raise NotRunningError("router.port is 0, so the port was picked: name it with --at")
    return settings.url(settings.host, settings.port)


def fetch_status(url: str, token: str, trust: Trust = True) -> ClusterStatus:
    """Ask the router at `url`, such as `http://127.0.0.1:8000`.

    Args:
        url: Where it is.
        token: Its token, or a key that may ask.
        trust: Which certificates are believed.

    Raises:
        NotRunningError: No router answers there, or it does not answer as Pie does.
    """
    answer = ask_router("GET", url, "/status", token=token, trust=trust, timeout_s=_TIMEOUT_S)
    return answer.read(ClusterStatus)


def show_status(url: str, token: str, console: Console, trust: Trust = True) -> None:
    """Print the status of the router at `url`.

    Raises:
        NotRunningError: As `fetch_status`.
    """
    status = _in_order(fetch_status(url, token, trust))
    console.print(f"router  {url}    model {status.model or 'none'}    index {status.index}")
    if status.routers_together != "ok":
        console.print(
            "routers  each for itself: Redis does not answer for what they share, or refuses it"
        )
    if policies := _policies(status):
        console.print(f"policies  {policies}", markup=False)
    if status.policy_edit_refused:
        console.print(f"policies  {status.policy_edit_refused}", markup=False)
    # What is refused cannot be applied either.
    if status.policy_file_differs and not status.policy_edit_refused:
        console.print(f"policies  {status.policy_file_differs}", markup=False)
    for line in _failing(status):
        console.print(f"policies  {line}", markup=False)
    for one in status.wanted:
        up = f"{one.workers} {'is' if one.workers == 1 else 'are'} up"
        said = f"{one.model}  {one.wanted} workers, {up}: {one.reason}"
        console.print(printable(f"wanted    {said}"), markup=False)
    if status.reason:
        console.print(f"why     {status.reason}", markup=False)
    console.print(_loads(status.workers))
    told = [one for one in status.workers if one.counters]
    if told:
        console.print()
        console.print(_work(told))
    if tiered := [one for one in told if one.gauges]:
        console.print()
        console.print(_tiers(tiered))
    if status.pool:
        console.print()
        console.print(_nodes(status.pool))
    if tiered_nodes := [one for one in status.pool if len(_tiers_of(one)) > 1]:
        console.print()
        console.print(_node_tiers(tiered_nodes))
    share = status.cached_tokens_total / status.prompt_tokens if status.prompt_tokens else 0.0
    sources = ", ".join(f"{name} {count}" for name, count in status.cached_tokens.items() if count)
    console.print()
    console.print(
        f"hit rate {share:.1%} of {status.prompt_tokens} prompt tokens"
        + (f" ({sources})" if sources else "")
        + f"    requests {status.requests}"
        + _counted_by(status),
        markup=False,
    )


def _in_order(status: ClusterStatus) -> ClusterStatus:
    """Return a status with places and routers by name: which router is asked, and what it heard of first, changes."""
    return msgspec.structs.replace(
        status,
        workers=sorted(status.workers, key=lambda one: _numbered(one.place)),
        pool=sorted(status.pool, key=lambda one: _numbered(one.place)),
        routers=sorted(status.routers, key=lambda one: _numbered(one.router)),
    )


def _numbered(name: str) -> list[tuple[int, str]]:
    """Return what sorts `worker-10` after `worker-2`."""
    return [(int(one), "") if one.isdecimal() else (-1, one) for one in re.split(r"(\d+)", name)]


def _counted_by(status: ClusterStatus) -> str:
    """Return whose counts these are, where that is no matter of course."""
    if len(status.routers) > 1:
        return f"    of {len(status.routers)} routers"
    if status.routers_together != "ok" and status.routers:
        return f"    of {status.routers[0].router} alone"
    return ""


def _policies(status: ClusterStatus) -> str:
    """Return which version of the policies runs where; nothing where none was applied."""
    where = {"router": (status.policy_version, status.policy_refused)}
    if len(status.routers) > 1:
        where = {one.router: (one.policy_version, one.policy_refused) for one in status.routers}
    for one in [*status.workers, *status.pool]:
        if one.gauges:
            gauges = one.gauges
            where[one.place] = (
                int(gauges.get("policy_version", 0)),
                int(gauges.get("policy_refused", 0)),
            )
    if not any(version or refused for version, refused in where.values()):
        return ""
    versions = sorted({version for version, _ in where.values()})
    told = [
        f"version {version}: "
        + ", ".join(
            place + (f" (did not take {refused})" if refused else "")
            for place, (runs, refused) in where.items()
            if runs == version
        )
        for version in versions
    ]
    return "; ".join(told)


def _failing(status: ClusterStatus) -> list[str]:
    """Return a line for each place whose policy in force has failed, and for that of routers."""
    lines = []
    if status.policy_failures:
        lines.append(f"routing policy failed {short(status.policy_failures)}x, so `cost` chose")
    counted = (
        ("failed {}x", "policy_failing.failures"),
        ("`lru` completed {} answers", "policy_failing.fallbacks"),
        ("{} proposals were no pages there", "policy_failing.unknown"),
    )
    for one in [*status.workers, *status.pool]:
        told = [
            say.format(short(count)) for say, name in counted if (count := one.gauges.get(name))
        ]
        if told:
            lines.append(f"{one.place}'s retention policy: {', '.join(told)}")
    return lines


def _loads(workers: Sequence[WorkerLine]) -> Table:
    """Return how busy each worker is."""
    table = _table(
        "worker", "state", "running", "waiting", "pages free", "indexed", "prefill tok/s"
    )
    for one in workers:
        table.add_row(
            one.place,
            one.state,
            str(one.running),
            str(one.waiting),
            f"{one.free_pages}/{one.total_pages}",
            short(sum(one.pages.values())),
            f"{one.prefill_tokens_per_s:.0f}",
        )
    return table


def _work(workers: Sequence[WorkerLine]) -> Table:
    """Return what each worker has done since its start."""
    columns = {
        "cached tok": "cached_tokens_device",
        "from pool": "cached_tokens_pool",
        "stored": "pages_stored",
        "dropped": "pages_store_dropped",
        "loaded": "pages_loaded",
        "preempted": "preemptions",
        "failed": "failed",
    }
    table = _table("worker", *columns)
    for one in workers:
        table.add_row(one.place, *(_figure(one.counters, name) for name in columns.values()))
    return table


def _tiers(workers: Sequence[WorkerLine]) -> Table:
    """Return what each worker holds below device memory, and what came back from there."""
    table = _table(
        "worker", "host", "of", "disk", "of", "host tok", "disk tok", "evicted", "lost", "bad"
    )
    for one in workers:
        table.add_row(
            one.place,
            *(
                _size(one.gauges, f"{figure}.{tier}")
                for tier in ("host", "disk")
                for figure in ("tier_used_bytes", "tier_budget_bytes")
            ),
            *(
                _figure(one.counters, name)
                for name in (
                    "cached_tokens_host",
                    "cached_tokens_disk",
                    "pages_evicted",
                    "pages_lost",
                )
            ),
            _figure(one.counters, "disk_bad_pages"),
        )
    return table


def _nodes(nodes: Sequence[PlaceLine]) -> Table:
    """Return what each pool node holds, and what it has done since its start."""
    table = _table(
        "pool", "state", "used", "of", "pages", "hits", "misses", "evicted", "bad", "indexed"
    )
    for one in nodes:
        table.add_row(
            one.place,
            one.state,
            _size(one.gauges, "used_bytes"),
            _size(one.gauges, "budget_bytes"),
            _figure(one.gauges, "pages"),
            *(_figure(one.counters, name) for name in ("hits", "misses", "evicted", "bad_pages")),
            short(sum(one.pages.values())),
        )
    return table


def _tiers_of(node: PlaceLine) -> list[str]:
    """Return the names of a node's tiers."""
    names = ("pool_ram", "pool_disk", "pool_object")
    return [name for name in names if node.gauges.get(f"tier_budget_bytes.{name}")]


def _node_tiers(nodes: Sequence[PlaceLine]) -> Table:
    """Return what each node holds in which tier, and how its bucket is."""
    table = _table("pool", "ram", "disk", "of", "bucket", "of", "state", "bad", "dropped")
    for one in nodes:
        states = [
            name.partition(".")[2]
            for name, value in one.gauges.items()
            if name.startswith("object_state.") and value
        ]
        table.add_row(
            one.place,
            _size(one.gauges, "tier_used_bytes.pool_ram"),
            *(
                _size(one.gauges, f"{figure}.pool_{tier}")
                for tier in ("disk", "object")
                for figure in ("tier_used_bytes", "tier_budget_bytes")
            ),
            states[0] if states else "-",
            _figure(one.counters, "bad_pages"),
            _figure(one.counters, "object_dropped_pages"),
        )
    return table


def _table(*headings: str) -> Table:
    """Return an empty table; names and states stand left, numbers right."""
    return new_table(*headings, left=("state",), no_wrap=True)


def _figure(figures: Mapping[str, float], name: str) -> str:
    """Return a figure, the sum of those that have its name before a dot, or `-` for none."""
    found = [value for key, value in figures.items() if key.partition(".")[0] == name]
    return short(sum(found)) if found else "-"


def _size(figures: Mapping[str, float], name: str) -> str:
    """Return a number of bytes to read, or `-` for none."""
    size = figures.get(name)
    return "-" if size is None else _scaled(size, 1024, (" B", " KiB", " MiB", " GiB", " TiB"))


def short(number: float) -> str:
    """Return a count in a few characters: 99999, 123k, 4.5M."""
    return f"{number:.0f}" if number < 100_000 else _scaled(number, 1000, ("", "k", "M", "G"))


def _scaled(number: float, step: int, units: Sequence[str]) -> str:
    """Return a number with three digits and a unit."""
    at = 0
    # What would be rounded up to a step is one already.
    while number >= step - 0.5 and at < len(units) - 1:
        number /= step
        at += 1
    return f"{number:.{0 if at == 0 or number >= 99.95 else 1}f}{units[at]}"
