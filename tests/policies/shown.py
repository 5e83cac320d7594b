"""Two workers, a pool and conversations, as policies that move pages are shown them in tests."""

from __future__ import annotations

from collections.abc import Sequence

from pie.page.events import PlaceId, PlaceKind
from pie.policies.cluster_policy import (
    ClusterView,
    PlaceView,
    SessionView,
)
from tests.policies.pages import key

A, B, POOL = PlaceId("a"), PlaceId("b"), PlaceId("pool")
ROOT = b"model"
PAGES = tuple(key(at) for at in range(10))


def worker(place: PlaceId, **fields: object) -> PlaceView:
    given: dict[str, object] = {
        "model_root": ROOT,
        "page_bytes": 1 << 20,
        "total_pages": 100,
        "has_host": True,
    }
    return PlaceView(place, PlaceKind.WORKER, **(given | fields))  # type: ignore[arg-type]


def session(name: str = "s", place: PlaceId = A, **fields: object) -> SessionView:
    given: dict[str, object] = {
        "came_from": None,
        "moved_s": 1.0,
        "idle_s": 60.0,
        "pages": PAGES,
        "held": {A: 10},
        "model_root": ROOT,
    }
    return SessionView(name, place, **(given | fields))  # type: ignore[arg-type]


def view(
    *sessions: SessionView,
    places: Sequence[PlaceView] = (),
    nodes: int = 1,
    now_s: float = 0.0,
) -> ClusterView:
    shown = [*(places or (worker(A), worker(B))), PlaceView(POOL, PlaceKind.POOL)]
    return ClusterView(nodes, 1, (), now_s, shown, sessions)
