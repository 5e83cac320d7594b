"""How many workers models should have, as policies have said.

Covers which hints are in force: the largest of a round, each until nobody has said one for a while, and those of
an earlier leader until then. Pure. Does not cover what may be said (`pie.policies.cluster_manager`).
"""

from __future__ import annotations

from collections.abc import Mapping

from pie.policies.cluster_policy import Wanted

KEPT_S = 10.0
"""A policy that fails or stalls takes its hints along only after so long."""
MOST_MODELS = 256


class Hints:
    """Hints in force, by model."""

    def __init__(self) -> None:
        self._in_force: dict[str, tuple[Wanted, float]] = {}
        self._round: dict[str, Wanted] = {}
        self._has_begun = False

    def copy(self) -> Hints:
        """Return the same, to be changed by itself."""
        other = Hints()
        other._in_force, other._round = dict(self._in_force), dict(self._round)
        other._has_begun = self._has_begun
        return other

    def begin(self, wanted: Mapping[str, Wanted], now_s: float) -> None:
        """Begin a round; the first one takes over what is in force."""
        if not self._has_begun:
            self._has_begun = True
            self._in_force = {model: (one, now_s) for model, one in wanted.items()}
        self._round = {}

    def say(self, model: str, wanted: Wanted) -> str:
        """Learn a hint; return why it is not taken, or nothing."""
        if model not in self._round and len(self._round) >= MOST_MODELS:
            return f"{MOST_MODELS} models have hints already"
        before = self._round.get(model)
        if before is None or before.workers < wanted.workers:
            self._round[model] = wanted
        return ""

    def end(self, now_s: float) -> tuple[dict[str, Wanted], dict[str, Wanted]]:
        """End a round; return the models whose number has changed, and with what was said last those of which nobody says one any more."""
        changed: dict[str, Wanted] = {}
        lapsed: dict[str, Wanted] = {}
        for model, wanted in self._round.items():
            before = self._in_force.get(model)
            if before is None or before[0].workers != wanted.workers:
                changed[model] = wanted
            self._in_force[model] = (wanted, now_s)
        for model, (wanted, at_s) in list(self._in_force.items()):
            if now_s - at_s >= KEPT_S:
                del self._in_force[model]
                lapsed[model] = wanted
        return changed, lapsed

    def in_force(self) -> dict[str, Wanted]:
        """Return all that are in force."""
        return {model: one for model, (one, _) in self._in_force.items()}
