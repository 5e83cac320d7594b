"""What became of one request in a simulation."""

from __future__ import annotations

from dataclasses import dataclass, field

from pie.page.events import PlaceId


@dataclass(slots=True)
class Outcome:
    """One request. Times are on the simulation's clock."""

    number: int
    place: PlaceId
    """The worker that took it."""
    arrived_s: float
    prompt_tokens: int
    predicted_tokens: int
    """Tokens that the router expected not to be computed."""
    first_token_s: float | None = None
    ended_s: float | None = None
    cached: dict[str, int] = field(default_factory=dict)
    """Prompt tokens that were not computed, by the tier that they came from."""
    output_tokens: int = 0
    refused: bool = False

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed."""
        return sum(self.cached.values())

    @property
    def ttft_s(self) -> float | None:
        """Time to first token; None where there was none."""
        return None if self.first_token_s is None else self.first_token_s - self.arrived_s
