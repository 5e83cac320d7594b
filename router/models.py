"""The models that workers serve, and what a router needs to read and write their text.

Covers loading a tokenizer and template once for each digest, off the event loop, and which name
means what. Does not cover the workers themselves (`pie.router.workers`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pie.index.contract import PlaceRecord
from pie.router.errors import TokenizerMismatchError, model_not_found, unavailable
from pie.router.memory import AnswerMemory
from pie.router.prompt import PromptMaker
from pie.router.turns import Turns
from pie.tokens.errors import TokensError
from pie.tokens.pieces import PieceMemory
from pie.tokens.template import ChatTemplate
from pie.tokens.tokenizer import Tokenizer

log = logging.getLogger("pie.router.models")

T = TypeVar("T")

_RETRY_S = 5.0
"""How long a tokenizer that could not be loaded is left alone."""
_MOST_IDLE_TOKENIZERS = 4
"""Kept for workers that come back."""
_MOST_PAST_NAMES = 1000
"""Names that nobody serves any more of which it is known that somebody did."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that workers serve, as of now."""

    name: str
    digest: str
    """Of its tokenizer and template: workers with another one are other models."""
    prompts: PromptMaker
    context_tokens: int
    """The largest of its workers'."""
    vocab_size: int
    created_s: int
    """When this router first saw it, in seconds of the Unix epoch."""


class ModelCatalog:
    """Models by name, kept up with the workers' records.

    Args:
        memory: Remembers answers, for all models.
        pieces: Remembers what texts were tokenised to, for all models.
        thread_bytes: Longer texts are tokenised in a thread.
        threads: Where tokenizers are loaded.
        turns: Where long texts are tokenised.
        on_change: Called when a tokenizer has been loaded.
        retry_after_s: What a client is told to wait for a model that may come back.
    """

    def __init__(
        self,
        *,
        memory: AnswerMemory,
        pieces: PieceMemory,
        thread_bytes: int,
        threads: Executor,
        turns: Turns,
        on_change: Callable[[], None],
        retry_after_s: float = 2.0,
    ) -> None:
        self._memory = memory
        self._pieces = pieces
        self._thread_bytes = thread_bytes
        self._threads = threads
        self._turns = turns
        self._on_change = on_change
        self._retry_after_s = retry_after_s
        self._makers: dict[str, PromptMaker] = {}
        self._loads: dict[str, asyncio.Task[None]] = {}
        self._failed: dict[str, tuple[float, str]] = {}
        self._created: dict[str, int] = {}
        self._models: dict[str, ServedModel] = {}

    @property
    def models(self) -> tuple[ServedModel, ...]:
        """The models that can be asked for now."""
        return tuple(self._models.values())

    @property
    def problems(self) -> tuple[str, ...]:
        """Why tokenizers of workers that are up could not be loaded."""
        return tuple(reason for _, reason in self._failed.values())

    def get(self, name: str) -> ServedModel | None:
        """Return the model of that name; None where nobody serves it now."""
        return self._models.get(name)

    def served(self, name: str) -> ServedModel:
        """Return the model of that name.

        Raises:
            ApiError: 404 where nobody serves it, 503 where somebody did or nobody serves anything.
        """
        model = self._models.get(name)
        if model is not None:
            return model
        if self.was_served(name) or not self._models:
            why = f" ({self.problems[0]})" if self.problems else ""
            raise unavailable(f"No worker is ready{why}.", self._retry_after_s)
        raise model_not_found(name)

    def was_served(self, name: str) -> bool:
        """Say whether this router has ever seen a worker with a model of that name."""
        return name in self._created

    def update(self, records: Iterable[PlaceRecord]) -> None:
        """Take in the records of the workers that are up."""
        by_name: dict[str, list[PlaceRecord]] = {}
        for record in records:
            by_name.setdefault(record.model_name, []).append(record)
            self._created.setdefault(record.model_name, int(time.time()))
            if record.tokenizer_digest not in self._makers:
                self._load(record)
        models: dict[str, ServedModel] = {}
        for name, group in by_name.items():
            loaded = [record for record in group if record.tokenizer_digest in self._makers]
            if not loaded:
                continue
            # Two digests under one name happen while workers are replaced: most workers win.
            counts = Counter(record.tokenizer_digest for record in loaded)
            digest = max(counts, key=lambda d: (counts[d], d))
            chosen = [record for record in loaded if record.tokenizer_digest == digest]
            models[name] = ServedModel(
                name=name,
                digest=digest,
                prompts=self._makers[digest],
                context_tokens=max(record.context_tokens for record in chosen),
                vocab_size=min(record.vocab_size for record in chosen)
                or self._makers[digest].tokenizer.vocab_size,
                created_s=self._created[name],
            )
        self._models = models
        wanted = {record.tokenizer_digest for group in by_name.values() for record in group}
        for digest in [digest for digest in self._failed if digest not in wanted]:
            del self._failed[digest]
        _forget(self._makers, wanted, _MOST_IDLE_TOKENIZERS)
        _forget(self._created, by_name.keys(), _MOST_PAST_NAMES)

    async def close(self) -> None:
        """Wait for tokenizers that are being loaded."""
        for task in self._loads.values():
            task.cancel()
        await asyncio.gather(*self._loads.values(), return_exceptions=True)

    def _load(self, record: PlaceRecord) -> None:
        """Start loading a tokenizer, unless that is under way or has just failed."""
        digest = record.tokenizer_digest
        now_s = time.monotonic()
        failed = self._failed.get(digest)
        if digest in self._loads or (failed and now_s < failed[0] + _RETRY_S):
            return
        self._loads[digest] = asyncio.create_task(self._loaded(record))

    async def _loaded(self, record: PlaceRecord) -> None:
        digest = record.tokenizer_digest
        loop = asyncio.get_running_loop()
        try:
            maker = await loop.run_in_executor(self._threads, self._read, record)
        except (TokensError, TokenizerMismatchError, OSError) as error:
            self._fail(record, str(error))
        # A folder may hold anything, and a tokenizer is foreign code: one that fails in a way that
        # nobody thought of is said and left alone as well.
        except Exception:
            log.exception("the tokenizer of worker %s failed", record.place)
            self._fail(record, "its tokenizer cannot be loaded; the router's log says why")
        else:
            self._failed.pop(digest, None)
            self._makers[digest] = maker
        finally:
            del self._loads[digest]
        self._on_change()

    def _fail(self, record: PlaceRecord, why: str) -> None:
        """Note that a tokenizer could not be loaded."""
        digest = record.tokenizer_digest
        reason = f"worker {record.place}: {why}"
        if digest not in self._failed:
            log.warning("cannot serve %s: %s", record.model_name, reason)
        self._failed[digest] = (time.monotonic(), reason)

    def _read(self, record: PlaceRecord) -> PromptMaker:
        """Load tokenizer and template and hold them to the worker's digest."""
        folder = Path(record.tokenizer_path)
        tokenizer = Tokenizer.load(folder)
        if tokenizer.digest != record.tokenizer_digest:
            raise TokenizerMismatchError(
                f"the tokenizer files in {folder} are not those that the worker has "
                f"(digest {tokenizer.digest[:12]}, not {record.tokenizer_digest[:12]})"
            )
        return PromptMaker(
            tokenizer,
            ChatTemplate.load(folder),
            memory=self._memory,
            pieces=self._pieces,
            thread_bytes=self._thread_bytes,
            turns=self._turns,
        )


def _forget(known: dict[str, T], wanted: Collection[str], most: int) -> None:
    """Leave out what is not wanted, but for the latest."""
    for name in wanted:
        if name in known:
            # The last ones are those that were wanted last.
            known[name] = known.pop(name)
    idle = len(known) - sum(name in known for name in wanted)
    for name in list(known)[: max(0, idle - most)]:
        del known[name]
