"""Rules of other routers: which numbers they take, and what they make of them."""

from __future__ import annotations

import pytest

from pie.page.events import PlaceId
from pie.policies.errors import PolicyFileError
from pie.policies.loader import load_policies
from pie.policies.routing import RequestView, WorkerView
from pie.simulator.peers import RayPrefixAffinity


@pytest.mark.parametrize(
    ("peer", "options"),
    [
        ("SglangThreshold", "cache_threshold: -1"),
        ("SglangThreshold", "cache_threshold: .nan"),
        ("SglangThreshold", "balance_abs_threshold: -1"),
        ("SglangThreshold", "balance_rel_threshold: .inf"),
        ("RayPrefixAffinity", "imbalanced_threshold: -1"),
        ("RayPrefixAffinity", "match_rate_threshold: 1.1"),
        ("ProductionStackLoadAware", "beta: .nan"),
        ("DynamoCost", "overlap_weight: -1"),
        ("DynamoCost", "worker_pages: 0"),
    ],
)
def test_a_number_that_a_rule_cannot_go_by_is_told(peer: str, options: str) -> None:
    name = options.partition(":")[0]
    with pytest.raises(PolicyFileError, match=name):
        load_policies(
            f"cluster: {{routing: {{policy: 'pie.simulator.peers:{peer}', {options}}}}}", name="f"
        )


@pytest.mark.parametrize(("running", "chosen"), [(3, "held"), (4, "idle")])
def test_load_is_balanced_for_ray_while_the_difference_is_below_the_threshold(
    running: int, chosen: str
) -> None:
    request = RequestView("r", prompt_tokens=64, page_tokens=16)
    workers = [WorkerView(PlaceId("held"), 64, running=running), WorkerView(PlaceId("idle"), 0)]
    assert RayPrefixAffinity(imbalanced_threshold=4).choose(request, workers).place == chosen
    assert RayPrefixAffinity().choose(request, workers).place == "held"
