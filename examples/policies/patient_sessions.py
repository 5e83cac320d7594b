"""A routing policy: a conversation stays with its worker unless the wait there is too long."""

from __future__ import annotations

from collections.abc import Sequence

from pie.policies.routing import Choice, RequestView, WorkerView
from pie.policies.units import NonNegative


class PatientSessions:
    """The conversation's worker, else the one that holds most of the prompt, else the least busy.

    Args:
        patience_ms: A worker whose queue takes longer is passed over while another one's does not.
    """

    def __init__(self, patience_ms: NonNegative = 2_000.0) -> None:
        self._patience_ms = patience_ms

    def choose(self, request: RequestView, workers: Sequence[WorkerView]) -> Choice:
        """Return the worker that takes a request."""
        patient = [one for one in workers if one.wait_ms <= self._patience_ms] or list(workers)
        best = min(
            patient,
            key=lambda one: (not one.has_session, -one.device_tokens, one.wait_ms, one.place),
        )
        return Choice(best.place)
