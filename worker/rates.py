"""How fast something goes, learned from what was seen."""

from __future__ import annotations

_LONGEST_RETRY_S = 30.0


class Rate:
    """Tokens per second, where newer observations count more.

    Sums of tokens and seconds are kept rather than a mean of ratios: a large observation counts as
    much as the small ones that make it up.

    Args:
        initial: The rate until something was seen.
        half_life_tokens: An observation counts half after so many more tokens.
    """

    def __init__(self, initial: float, *, half_life_tokens: float = 8192) -> None:
        self._initial = initial
        self._half_life_tokens = half_life_tokens
        self._tokens = 0.0
        self._seconds = 0.0

    @property
    def is_known(self) -> bool:
        """Whether anything was seen."""
        return self._seconds > 0

    @property
    def per_s(self) -> float:
        """Tokens per second."""
        return self._tokens / self._seconds if self._seconds > 0 else self._initial

    def seconds(self, tokens: int) -> float:
        """Return how long so many tokens take."""
        return tokens / self.per_s

    def saw(self, tokens: int, seconds: float) -> None:
        """Learn that `tokens` took `seconds`; nothing is learned from none or no time."""
        if tokens <= 0 or seconds <= 0:
            return
        kept = 0.5 ** (tokens / self._half_life_tokens)
        self._tokens = self._tokens * kept + tokens
        self._seconds = self._seconds * kept + seconds


class StepTimes:
    """How long steps take, and what prefill and decode have in it.

    A step that decodes takes `decode_s`; prefill that goes along adds what is beyond that.
    """

    _SMALLEST_PREFILL = 32
    """Prefill of fewer tokens says more about a step's fixed cost than about a rate."""
    _KEPT = 0.9

    def __init__(self) -> None:
        self.prefill = Rate(1000.0)
        self.decode_s = 0.0
        """Mean of recent steps that only decoded; 0 until there was one."""
        self.step_s = 0.0
        """Mean of recent steps."""

    def saw(self, *, prefill_tokens: int, decode_tokens: int, seconds: float) -> None:
        """Learn from one step."""
        self.step_s = self._mean(self.step_s, seconds)
        if not prefill_tokens:
            self.decode_s = self._mean(self.decode_s, seconds)
        elif prefill_tokens >= self._SMALLEST_PREFILL:
            beside = self.decode_s if decode_tokens else 0.0
            self.prefill.saw(prefill_tokens, max(seconds - beside, seconds / 4))

    def prefill_tokens(self, target_s: float, *, least: int) -> int:
        """Return how much prefill fits beside decode into a step of `target_s`."""
        return max(least, int((target_s - self.decode_s) * self.prefill.per_s))

    def retry_after_s(self, waiting_tokens: int) -> float:
        """Return when to ask again, where so many tokens of prompts wait: 1 s at least, 30 at most."""
        return min(_LONGEST_RETRY_S, max(1.0, self.prefill.seconds(waiting_tokens)))

    def _mean(self, mean: float, seconds: float) -> float:
        return self._KEPT * mean + (1 - self._KEPT) * seconds if mean else seconds
