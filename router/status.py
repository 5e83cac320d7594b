"""What a router says of the cluster as it sees it.

Covers the answer of `GET /status`, which `pie status` prints. Does not cover metrics
(`pie.router.metrics`).
"""

from __future__ import annotations

import msgspec


class PlaceLine(msgspec.Struct, frozen=True, kw_only=True):
    """A pool node."""

    place: str
    address: str
    pages: dict[str, int]
    """Page parts in each tier, as the index knows them."""
    state: str
    """`ready`; what the place says of itself instead, such as `draining`; `silent` where it was
    asked and did not answer in time; or, of a worker, `unreachable` while the router has no
    connection."""
    counters: dict[str, int | float] = {}
    """What the place has counted since its start, as it says; empty where it did not answer."""
    gauges: dict[str, int | float] = {}
    """How the place is now, alike."""


class WorkerLine(PlaceLine, frozen=True, kw_only=True):
    """A worker, with the load that it last reported."""

    model: str = ""
    running: int = 0
    """Sequences in decode, as routers know."""
    waiting: int = 0
    """Sequences that wait for prefill, as it last said."""
    queued_tokens: int = 0
    """Prompt tokens that wait for prefill."""
    free_pages: int = 0
    total_pages: int = 0
    prefill_tokens_per_s: float = 0.0


class WantedLine(msgspec.Struct, frozen=True, kw_only=True):
    """How many workers a model should have, as a policy hints."""

    model: str
    workers: int
    wanted: int
    reason: str
    """Why it is that number."""
    policy: str


class RouterLine(msgspec.Struct, frozen=True, kw_only=True):
    """One router, as it says of itself."""

    router: str
    """What this start of it is called."""
    in_flight: int = 0
    """Sequences that it carries."""
    requests: int = 0
    """Requests to generate since its start, whatever became of them."""
    policy_version: int = 0
    policy_refused: int = 0


class ClusterStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The cluster. What routers count is of all `routers` together, each since its start."""

    model: str
    """What clients call the model; empty while no worker is known."""
    index: str
    """`ok`, `degraded` or `resyncing`."""
    routers_together: str = "ok"
    """`ok`; or `degraded` while Redis does not answer for what routers share, or refuses some of it, so that each has a share of tenants' quotas
    and the responses and explanations of its own requests alone."""
    routers: list[RouterLine] = []
    """Those that there are, the one that was asked in front; that one alone where Redis does not tell of the others."""
    workers: list[WorkerLine]
    pool: list[PlaceLine]
    ready: bool = False
    reason: str = ""
    """Why requests cannot be answered, or those for one of several models; empty where all can."""
    models: list[str] = []
    usable_workers: int = 0
    in_flight: int = 0
    """Sequences that routers carry."""
    requests: int = 0
    """Requests to generate, whatever became of them."""
    prompt_tokens: int = 0
    cached_tokens: dict[str, int] = {}
    """Prompt tokens that were not computed, by where their pages came from."""
    predicted_tokens: int = 0
    """Prompt tokens that the index said were held."""
    output_tokens: int = 0
    policy_version: int = 0
    """The version of the policies that the router that was asked runs; 0 where none was applied."""
    policy_refused: int = 0
    """The version that it could not take on; 0 where there is none."""
    policy_failures: int = 0
    """How often the routing policy in force failed, so that `cost` chose."""
    policy_edit_refused: str = ""
    """Why the latest edit of a policy file that is watched changed nothing; empty where it took effect."""
    policy_file_differs: str = ""
    """That another version is in force than the policy file of the router that was asked says; empty where it is that."""
    wanted: list[WantedLine] = []
    """Of models of which a policy says how many workers they should have."""
    remembered_answers: int = 0
    """At the router that was asked, as is the next one."""
    remembered_bytes: int = 0

    @property
    def cached_tokens_total(self) -> int:
        """Prompt tokens that were not computed."""
        return sum(self.cached_tokens.values())
