"""Which sequences of programs run in the next step, and what came of it.

Covers fair shares of a step. Pure; time comes in as `now_s`. Does not cover the order of calls
(`pie.worker.programs.roster`), one sequence's way through a pass (`pie.worker.programs.run`) or requests
(`pie.worker.scheduler`), which run in the same steps.

Every sequence of a program that wants one token gets it in each step, up to a limit; prefill of programs
shares what the step has left evenly among those that want some, and each step begins with another
program. A page that somebody else is computing is waited for and shared.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import msgspec
import torch

from pie.page.key import PageKey
from pie.wire.programs import PassDone, Trouble
from pie.worker.batch import Pass, StepOutput
from pie.worker.grammar import GrammarFailedError
from pie.worker.programs.answers import part_of
from pie.worker.programs.ledger import PageLedger
from pie.worker.programs.loading import ProgramLoad
from pie.worker.programs.roster import Job, Roster
from pie.worker.programs.run import Run
from pie.worker.programs.trouble import CallError
from pie.worker.sampling import draw

log = logging.getLogger("pie.worker.programs.lane")

_WAITS_FOR_PAGES_S = 5.0
"""How long a pass waits for room before it fails: others may end meanwhile."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """The next tokens of a run."""

    job: Job
    run: Run
    tokens: int


class ProgramLane:
    """The programs' part of an engine's steps.

    Args:
        roster: The programs.
        ledger: Their pages.
        page_tokens: Tokens in a page.
        max_rows: Most sequences in one step.
    """

    def __init__(
        self,
        roster: Roster,
        ledger: PageLedger,
        *,
        page_tokens: int,
        max_rows: int,
    ) -> None:
        self.roster = roster
        self._ledger = ledger
        self._page_tokens = page_tokens
        self._max_rows = max_rows
        self.load_wish: Callable[[ProgramLoad], int] = lambda _: 0
        """Says how many pages to load rather than compute."""
        self.load: Callable[[ProgramLoad], None] = lambda _: None
        """Begins to load them; `loaded` is to be called when that is over."""
        self._planned: list[_Chunk] = []

    def plan(
        self, *, prefill_tokens: int, now_s: float, under_way: Collection[PageKey]
    ) -> list[Pass]:
        """Choose the passes of the next step.

        Args:
            prefill_tokens: Most tokens of sequences that want more than one.
            now_s: The time.
            under_way: Keys of pages that requests are computing.
        """
        programs = list(self.roster.programs.values())
        if not programs:
            return []
        self._planned = []
        waiting: list[list[tuple[Job, Run]]] = []
        for program in programs:
            runs = [(job, run) for job in program.running() for run in job.runs if run.left]
            ready = [(job, run) for job, run in runs if not run.is_loading]
            for job, run in ready:
                if run.left == 1:
                    self._choose(job, run, 1, set(), now_s)
            waiting.append([(job, run) for job, run in ready if run.left > 1])
        keys, left = set(under_way), prefill_tokens
        for load in self.roster.loads:
            keys.update(load.run.announced() if load.is_wanted else ())
        rounds = itertools.chain.from_iterable(itertools.zip_longest(*waiting))
        wanting = [one for one in rounds if one is not None]
        for ahead, (job, run) in enumerate(wanting):
            if left <= 0:
                break
            sharers = min(len(wanting) - ahead, sum(map(bool, waiting)))
            share = max(self._page_tokens, left // sharers)
            left -= self._choose(job, run, min(share, left), keys, now_s)
        # Another program comes first next time.
        first = programs[0].name
        self.roster.programs[first] = self.roster.programs.pop(first)
        return self._passes(now_s)

    def finish(self, output: StepOutput, first: int, finite: Sequence[bool], now_s: float) -> None:
        """Take in what the planned passes gave.

        Args:
            output: Of the whole step.
            first: The first of them in it.
            finite: Of each, whether it came out as numbers.
            now_s: The time.
        """
        planned, self._planned = self._planned, []
        try:
            self._take_in(planned, output, first, finite, now_s)
        except Exception as error:
            log.exception("a program's call failed")
            # Nothing that a program asks may end the step thread, which is everybody's.
            for job in dict.fromkeys(chunk.job for chunk in planned):
                self._broke(job, error)
        self.roster.end_failed(now_s)

    def _take_in(
        self,
        planned: Sequence[_Chunk],
        output: StepOutput,
        first: int,
        finite: Sequence[bool],
        now_s: float,
    ) -> None:
        drawing: list[tuple[_Chunk, int]] = []
        for at, chunk in enumerate(planned):
            run, at_output = chunk.run, first + at
            if chunk.job.failure is not None:
                run.set.lose_state()
                continue
            if not finite[at]:
                run.set.lose_state()
                error = CallError(Trouble.FAILED, "the model's output is not a number")
                self.roster.fail(chunk.job, error)
                continue
            hidden = None if output.hidden is None else output.hidden[at_output]
            scores = output.scores[at_output]
            try:
                run.take(chunk.tokens, output.of(at_output), hidden, scores, now_s)
            except Exception as error:
                log.exception("a program's call failed")
                run.set.lose_state()
                self._broke(chunk.job, error)
                continue
            for page in run.set.take_new_pages():
                self.roster.on_new_page(page)
            if not run.left and run.row is not None:
                drawing.append((chunk, output.rows[at_output].stop - 1))
        self._draw(drawing, output.logits)
        for job in dict.fromkeys(chunk.job for chunk in planned):
            if job.failure is None and not any(run.left for run in job.runs):
                try:
                    self._done(job, now_s)
                except Exception as error:
                    log.exception("a program's call failed")
                    self._broke(job, error)

    def _draw(self, drawing: Sequence[tuple[_Chunk, int]], logits: torch.Tensor) -> None:
        """Draw the next token of runs from rows of `logits`; all at once where none is in the way."""
        if not drawing:
            return
        try:
            self._draw_at_once(drawing, logits)
        except Exception:
            log.exception("tokens could not be drawn at once, so it is done one by one")
            for chunk, row in drawing:
                try:
                    self._draw_at_once([(chunk, row)], logits)
                except Exception as error:
                    log.exception("a program's call failed")
                    self._broke(chunk.job, error)

    def _draw_at_once(self, drawing: Sequence[tuple[_Chunk, int]], logits: torch.Tensor) -> None:
        rows = [chunk.run.row for chunk, _ in drawing if chunk.run.row is not None]
        tokens = draw(logits[[row for _, row in drawing]], rows)
        for (chunk, _), token in zip(drawing, tokens, strict=True):
            chunk.run.token = token

    def loaded(self, load: ProgramLoad, pages: int, now_s: float, *, has_state: bool) -> None:
        """Learn that a load is over, of which the first `pages` pages came, and the state after them or not."""
        self.roster.loads.remove(load)
        load.run.is_loading = False
        try:
            load.end(pages, now_s, has_state=has_state)
        except Exception as error:
            log.exception("a program's call failed")
            self._broke(load.job, error)
        self.roster.end_failed(now_s)

    def fail(self, reason: str, now_s: float) -> None:
        """Learn that the step failed as a whole."""
        planned, self._planned = self._planned, []
        for chunk in planned:
            chunk.run.set.lose_state()
            self.roster.fail(chunk.job, CallError(Trouble.FAILED, reason))
        self.roster.end_failed(now_s)

    def _passes(self, now_s: float) -> list[Pass]:
        """Return the passes of what is planned; a job of which one cannot be made has failed as a whole."""
        made: list[tuple[_Chunk, Pass]] = []
        for chunk in self._planned:
            if chunk.job.failure is not None:
                continue
            try:
                made.append((chunk, chunk.run.make_pass(chunk.tokens)))
            except Exception as error:
                log.exception("a program's call failed")
                self._broke(chunk.job, error)
        # The other sequences of a job that failed may be among them.
        made = [one for one in made if one[0].job.failure is None]
        self._planned = [chunk for chunk, _ in made]
        self.roster.end_failed(now_s)
        return [one for _, one in made]

    def _broke(self, job: Job, error: Exception) -> None:
        """Note that a job failed by a mistake of ours."""
        self.roster.fail(job, CallError(Trouble.FAILED, f"{type(error).__name__}: {error}"))

    def _choose(
        self, job: Job, run: Run, budget: int, under_way: set[PageKey], now_s: float
    ) -> int:
        """Plan the next tokens of a run, at most `budget`; return how many."""
        if job.failure is not None:
            return 0
        try:
            if run.left == 1:
                return int(self._add(job, run, 1, now_s))
            return self._prefill(job, run, budget, under_way, now_s)
        except Exception as error:
            log.exception("a program's call failed")
            self._broke(job, error)
            return 0

    def _prefill(
        self, job: Job, run: Run, budget: int, under_way: set[PageKey], now_s: float
    ) -> int:
        """Plan a chunk; return its tokens. None while somebody else computes its next page."""
        run.match(now_s)
        if run.waits_for(under_way):
            return 0
        under_way.update(run.announced())
        if self._begin_load(job, run, now_s):
            return 0
        count = run.next_chunk(budget)
        return count if self._add(job, run, count, now_s) else 0

    def _begin_load(self, job: Job, run: Run, now_s: float) -> bool:
        """Let a run load what comes next of it, once, where that is wished."""
        run.set.trim()
        if run.load_tried or not run.loadable_keys():
            return False
        run.load_tried = True
        load = ProgramLoad(job, run, self._ledger, self.roster.states)
        count = self.load_wish(load)
        if count <= 0 or not load.reserve(count, now_s):
            return False
        run.is_loading = True
        self.roster.loads.append(load)
        self.load(load)
        return True

    def _add(self, job: Job, run: Run, count: int, now_s: float) -> bool:
        """Plan a chunk where there is room for it; a run that finds none for long fails."""
        if len(self._planned) >= self._max_rows:
            return False
        if run.set.reserve(count, now_s):
            run.blocked_s = None
            self._planned.append(_Chunk(job, run, count))
            return True
        run.blocked_s = now_s if run.blocked_s is None else run.blocked_s
        if now_s - run.blocked_s > _WAITS_FOR_PAGES_S:
            self.roster.fail(job, run.set.no_room(count))
        return False

    def _done(self, job: Job, now_s: float) -> None:
        """Answer a job whose runs have run, or let it go on."""
        if job.continuation is None:
            parts = [part_of(run) for run in job.runs]
            frames = [frame for _, more in parts for frame in more]
            done = PassDone(job.number, tuple(part for part, _ in parts))
            self.roster.end(job, done, frames, now_s)
            return
        (run,) = job.runs
        assert run.token is not None
        try:
            drawn = job.continuation.push(run.token)
        except GrammarFailedError as error:
            self.roster.fail(job, CallError(Trouble.FAILED, f"the grammar failed: {error}"))
            return
        if not drawn.finish:
            self.roster.say(job, drawn)
            run.go_on()
            return
        one = run.set
        told = msgspec.structs.replace(
            drawn, length=one.next_slot, pages=len(one.pages), cached_tokens=one.cached_tokens
        )
        self.roster.end(job, told, (), now_s)
