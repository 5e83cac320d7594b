"""One sequence's life: choose a worker, send, retry before the first token, resume after it.

Covers attempts and their limits. Does not cover how many there are (`pie.router.tries`), who is chosen
(`pie.router.choice`) or how text reaches the client (`pie.router.exchange`).

A resume sends the prompt with the tokens that the client has, and where the prompt ends: the new
worker feeds those to its detokeniser and stop matcher without sending their text again, counts
them for penalties, and draws the next token for the next output position.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

import msgspec

from pie.index.contract import PlaceRecord
from pie.page.key import RootKey, tenant_root
from pie.router.books import Running
from pie.router.choice import Chooser, Chosen
from pie.router.conversations import ConversationKey
from pie.router.errors import ApiError, invalid, server_error, too_large
from pie.router.generation import Ending, Generation, Tried
from pie.router.link import WorkerLink
from pie.router.metrics import RouterMetrics
from pie.router.settings import RouterSettings
from pie.router.tenant import session_tag, tenant_tag
from pie.router.tries import Tries
from pie.router.workers import WorkerSet
from pie.wire import WireError, WireTimeout
from pie.wire.errors import MessageTooLarge
from pie.wire.messages import Generate, RefusalCode

log = logging.getLogger("pie.router.dispatch")

_POLL_S = 0.02
"""How often a request that lost its worker looks for another."""
_POLLING = 100
"""So many look as often as that; more do so less often, but every `_POLL_MOST_S`."""
_POLL_MOST_S = 1.0
_SEND_TIMEOUT_S = 5.0
_NO_CONVERSATION = contextlib.nullcontext()
_LEAST_S = 0.001
"""What a request whose time is up gives its worker."""


class Dispatcher:
    """Carries sequences out.

    Args:
        workers: Who can.
        chooser: Chooses among them.
        settings: Limits.
        metrics: Counts what happens.
        secret: 32 bytes that all of the cluster share; keys the tags of tenants.
    """

    def __init__(
        self,
        workers: WorkerSet,
        chooser: Chooser,
        settings: RouterSettings,
        metrics: RouterMetrics,
        *,
        secret: bytes | None = None,
    ) -> None:
        self._secret = secret
        self._workers = workers
        self._chooser = chooser
        self._settings = settings
        self._metrics = metrics
        self._without_worker = 0
        """Sequences that look for a worker now."""

    async def run(self, generation: Generation) -> None:
        """Carry a sequence out; what it makes, and why it cannot go on, goes to its mailbox.

        Cancelling this cancels it at the worker.
        """
        try:
            await self._attempts(generation)
        except ApiError as error:
            generation.mailbox.fail(error)
        except Exception:
            log.exception("request %s failed", generation.request_id)
            generation.mailbox.fail(server_error("The router failed."))
        finally:
            order = generation.order
            if order.session is not None and order.begins_session and generation.finish is None:
                self._chooser.conversations.forget((order.prefix.salt, order.session))

    async def _attempts(self, generation: Generation) -> None:
        tries = Tries(generation.order, self._settings)
        while tries.may_go_on():
            chosen = await self._pick(generation, tries)
            if chosen is None:
                break
            generation.chosen = chosen
            before = len(generation.output_ids)
            tried = Tried(chosen, before)
            generation.history.append(tried)
            with self._noted(generation, chosen):
                ending = await self._attempt(generation, chosen)
            generation.chosen = None
            made = len(generation.output_ids) - before
            if made and generation.model_root is None:
                generation.model_root = chosen.link.record.model_root
            tried.ending = ending.value
            if ending is Ending.DONE:
                return
            tried.ending = self._lost(generation, chosen.link, ending)
            if ending is Ending.REFUSED:
                self._raise_for_good(generation)
            tries.ended(
                chosen.link,
                ending,
                tried.ending,
                tokens=made,
                refused=generation.refused,
                failure=generation.failure,
            )
        order = generation.order
        raise tries.gave_up(
            others=len(self._candidates(generation, tries)),
            nobody=self._workers.none_takes(order.model.name, order.only_place),
        )

    async def _pick(self, generation: Generation, tries: Tries) -> Chosen[WorkerLink] | None:
        """Return the worker for the next attempt; None where there is none.

        Raises:
            ApiError: The request's time ran out while it waited for one.
        """
        while not (links := self._candidates(generation, tries)) or (
            # Whoever has had a turn meanwhile may have taken a worker.
            generation.prefix.is_long and await generation.prefix.prepare(_models(links))
        ):
            if links:
                continue
            if not tries.waits(time.monotonic()):
                return None
            if not self._remaining_s(generation):
                raise self._late()
            self._without_worker += 1
            try:
                await asyncio.sleep(
                    min(_POLL_S * max(1.0, self._without_worker / _POLLING), _POLL_MOST_S)
                )
            finally:
                self._without_worker -= 1
        chosen = _with_leader(generation, links) or self._chooser.choose(
            generation.request_id, generation.prefix, links, session=generation.order.session
        )
        if generation.order.prompt_logprobs is not None and chosen.awaited_pages:
            # All of the prompt is computed, whoever has its pages.
            chosen = msgspec.structs.replace(chosen, awaited_pages=0)
        if generation.model_root not in (None, chosen.link.record.model_root):
            self._metrics.other_models.inc()
            log.info("request %s goes on at another model", generation.request_id)
        if generation.first_token_s is None:
            generation.predicted_tokens = chosen.predicted_tokens
            generation.place = chosen.link.record.place
        return chosen

    def _candidates(self, generation: Generation, tries: Tries) -> list[WorkerLink]:
        """Return the workers that may take it and are not left out for now.

        Of a sequence that has begun those with its very model, where there are any: amid a change of weights or
        dtype there are others of the same name.
        """
        order = generation.order
        length = len(order.prompt.ids) + len(generation.output_ids)
        links = [
            link
            for link in self._workers.usable(order.model.name, order.model.digest)
            if not tries.leaves_out(link)
            and length < link.record.context_tokens
            and order.only_place in (None, link.record.place)
        ]
        same = [link for link in links if link.record.model_root == generation.model_root]
        return same or links

    async def _attempt(self, generation: Generation, chosen: Chosen[WorkerLink]) -> Ending:
        """Send it to one worker and wait for the end."""
        order, link, prefix = generation.order, chosen.link, chosen.prefix
        assert link.record.model_root is not None
        ended = generation.next_attempt()
        remaining_s = max(self._remaining_s(generation), _LEAST_S)
        message = Generate(
            request_id=generation.attempt_id,
            epoch=link.record.epoch,
            output_start=len(order.prompt.ids),
            max_tokens=order.max_tokens,
            sampling=order.sampling,
            stop=order.stop,
            stop_token_ids=order.stop_token_ids,
            ignore_eos=order.ignore_eos,
            grammar=order.grammar,
            shows_special=order.shows_special,
            shows_stop=order.shows_stop,
            salt=prefix.salt,
            fork_of=chosen.fork_of,
            forks=generation.followers if generation.attempts == 1 else 0,
            tenant_tag=tenant_tag(link.record.model_root, order.tenant_salt, self._secret),
            session_tag=session_tag(
                link.record.model_root, prefix.salt, order.session, self._secret
            ),
            deadline_s=remaining_s,
            priority=order.priority,
            prompt_logprobs=order.prompt_logprobs if generation.first_token_s is None else None,
            await_pages=chosen.awaited_pages,
            await_s=chosen.await_s,
        )
        running = _running(generation, chosen)
        if generation.attempts == 1:
            self._metrics.overhead_s.observe(time.monotonic() - order.arrived_s)
        try:
            await link.begin(message, prefix.packed, running, timeout_s=_SEND_TIMEOUT_S)
        except MessageTooLarge as error:
            raise too_large(f"No worker takes a request of this size: {error}") from error
        except WireTimeout:
            return Ending.SILENT
        except WireError:
            return Ending.GONE
        watch = _Watch(generation, running, ended, self._settings, remaining_s)
        try:
            ending = await ended
        finally:
            watch.stop()
            link.cancel(message.request_id)
        if ending is Ending.LATE:
            generation.history[-1].ending = ending.value
            raise self._late()
        return ending

    def _noted(
        self, generation: Generation, chosen: Chosen[WorkerLink]
    ) -> AbstractContextManager[None]:
        """Note whose prompt is where; return what notes that a request of a conversation runs, if it is one's."""
        order, salt = generation.order, chosen.prefix.salt
        session, root = order.session, chosen.link.record.model_root
        assert root is not None
        tag = session_tag(root, salt, session, self._secret)
        tenant = tenant_tag(root, order.tenant_salt, self._secret)
        self._chooser.demand.held_by(
            chosen.keys,
            time.monotonic(),
            model_root=root,
            tenant_tag=tenant,
            session_tag=tag,
            root=tenant_root(root, salt=salt),
        )
        if session is None:
            return _NO_CONVERSATION
        self._chooser.conversations.named((salt, session), tag, tenant)
        return self._running_of(generation, (salt, session), chosen.link.record)

    @contextlib.contextmanager
    def _running_of(
        self, generation: Generation, key: ConversationKey, record: PlaceRecord
    ) -> Iterator[None]:
        """Note at the end which pages a conversation has then."""
        try:
            yield
        finally:
            assert record.model_root is not None
            # The last token was drawn, and what it would add to a page is not computed.
            tokens = len(generation.order.prompt.ids) + max(0, len(generation.output_ids) - 1)
            keys = generation.prefix.keys(record.model_root, record.page_tokens)
            self._chooser.conversations.ended(
                key, keys[: tokens // record.page_tokens], time.monotonic()
            )

    def _remaining_s(self, generation: Generation) -> float:
        """Return the time that a request has left; 0 for none."""
        used_s = time.monotonic() - generation.order.arrived_s
        return max(self._settings.request_timeout_s - used_s, 0.0)

    def _late(self) -> ApiError:
        """Return what to tell a client whose request's time is up."""
        limit_s = self._settings.request_timeout_s
        return server_error(f"No full answer within {limit_s:g} s.", "timeout", 504)

    def _lost(self, generation: Generation, link: WorkerLink, ending: Ending) -> str:
        """Count and log an attempt that did not bring the answer; return why."""
        reason = ending.value
        if ending is Ending.REFUSED and generation.refused is not None:
            reason = generation.refused.code.value
            if generation.refused.code is RefusalCode.STALE_EPOCH:
                # It has started anew, which its record will say in a moment.
                generation.refused = None
        counter = self._metrics.retries
        if generation.first_token_s is not None:
            counter = self._metrics.resumes
        counter.labels(reason).inc()
        log.info(
            "request %s lost worker %s (%s) after %d tokens",
            generation.request_id,
            link.record.place,
            reason,
            len(generation.output_ids),
        )
        return reason

    def _raise_for_good(self, generation: Generation) -> None:
        """Raise where no other worker would take it either."""
        refused = generation.refused
        if refused is None or generation.first_token_s is not None:
            return
        if refused.code is RefusalCode.CONTEXT_LENGTH:
            raise invalid(refused.message, generation.order.param, "context_length_exceeded")
        if refused.code is RefusalCode.BAD_GRAMMAR:
            param = generation.order.grammar_param
            raise invalid(f"{param}: {refused.message}", param)
        if refused.code is RefusalCode.BAD_MESSAGE:
            raise invalid(refused.message, None)


def _models(links: Sequence[WorkerLink]) -> Iterator[tuple[RootKey, int]]:
    """Yield what the keys of a prompt depend on at workers."""
    for link in links:
        assert link.record.model_root is not None
        yield link.record.model_root, link.record.page_tokens


def _with_leader(generation: Generation, links: Sequence[WorkerLink]) -> Chosen[WorkerLink] | None:
    """Return the worker that is computing its prompt for another choice; None where none is."""
    leader = generation.leader
    if leader is None or generation.attempts or leader.first_token_s is not None:
        return None
    if leader.chosen is None or leader.chosen.link not in links:
        return None
    return msgspec.structs.replace(
        leader.chosen,
        predicted_tokens=len(leader.chosen.prefix.ids),
        fork_of=leader.attempt_id,
    )


def _running(generation: Generation, chosen: Chosen[WorkerLink]) -> Running:
    """Return what an attempt counts for at its worker."""
    tokens, keys, later_keys = len(chosen.prefix.ids), chosen.keys, chosen.keys[:0]
    known_tokens = chosen.predicted_tokens
    if chosen.awaited_pages:
        known_tokens = min(chosen.awaited_pages * chosen.link.record.page_tokens, tokens - 1)
        keys, later_keys = keys[: chosen.held_pages], keys[chosen.held_pages :]
    return Running(
        sink=generation,
        keys=keys,
        new_tokens=tokens - known_tokens,
        prompt_tokens=tokens,
        later_keys=later_keys,
    )


class _Watch:
    """Ends an attempt whose worker is silent for too long, or whose time is up."""

    def __init__(
        self,
        generation: Generation,
        running: Running,
        ended: asyncio.Future[Ending],
        settings: RouterSettings,
        remaining_s: float,
    ) -> None:
        self._generation = generation
        self._running = running
        self._ended = ended
        self._settings = settings
        self._until_s = time.monotonic() + remaining_s
        self._handle = self._later()

    def stop(self) -> None:
        """Watch no longer."""
        self._handle.cancel()

    def _limit_s(self) -> float:
        """Return when the worker has been silent for too long."""
        settings = self._settings
        started = self._running.started
        gap_s = settings.token_gap_timeout_s if started else settings.first_token_timeout_s
        return self._generation.last_heard_s + gap_s

    def _later(self) -> asyncio.TimerHandle:
        """Look again when a limit could be reached."""
        delay_s = min(self._limit_s(), self._until_s) - time.monotonic()
        return asyncio.get_running_loop().call_later(max(delay_s, 0.01), self._look)

    def _look(self) -> None:
        now_s = time.monotonic()
        if self._ended.done():
            return
        if now_s >= self._until_s:
            self._ended.set_result(Ending.LATE)
        elif now_s >= self._limit_s():
            self._ended.set_result(Ending.SILENT)
        else:
            self._handle = self._later()
