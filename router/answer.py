"""One HTTP request's answer: its sequences are started, written to the client, and accounted for.

Covers streaming and not, hanging up, headers, usage and remembering. Does not cover parsing
(`pie.router.api`), sequences (`pie.router.dispatch`) or sockets (`pie.router.exchange`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

import msgspec

from pie.router.api.usage import Shaper, Usage, usage
from pie.router.dispatch import Dispatcher
from pie.router.errors import ApiError
from pie.router.exchange import ClientGoneError, Exchange
from pie.router.generation import Generation, Order
from pie.router.likeliest import Likeliest
from pie.router.load_told import told_load
from pie.router.mailbox import Mailbox
from pie.router.metrics import RouterMetrics
from pie.router.rates import loaded_tokens

log = logging.getLogger("pie.router.answer")

_CLIENT_GONE = 499
"""What proxies count a client as that hung up; nobody is sent it."""


OnOver = Callable[[Exchange, Sequence[Generation], int], None]
"""Told of a request that has ended, whether or not it was answered, and with which status."""


def _nobody(_: Exchange, __: Sequence[Generation], ___: int) -> None:
    pass


class Answerer:
    """Answers requests whose orders are known.

    Args:
        dispatcher: Carries them out.
        metrics: Counts what was made.
        on_over: Told of each request at its end.
    """

    def __init__(
        self, dispatcher: Dispatcher, metrics: RouterMetrics, on_over: OnOver = _nobody
    ) -> None:
        self._dispatcher = dispatcher
        self._on_over = on_over
        self._metrics = metrics
        self._open: set[Mailbox] = set()

    def stop(self, error: ApiError) -> None:
        """End every request that is under way with `error`."""
        for mailbox in self._open:
            mailbox.fail(error)

    async def answer(
        self,
        exchange: Exchange,
        orders: Sequence[Order],
        shaper: Shaper,
        *,
        choices: int,
        likeliest: Likeliest | None,
        stream: bool,
        usage_events: bool,
    ) -> None:
        """Generate and answer.

        Args:
            exchange: Where the answer goes.
            orders: One for each sequence, the choices of a prompt next to each other.
            shaper: Gives the answer its shape.
            choices: Sequences for each prompt.
            likeliest: Which of them are the answer; None for all. Never with a stream.
            stream: Whether to send events while they are made.
            usage_events: Whether the last event has the usage.

        Raises:
            ApiError: It cannot be answered, or not to its end.
            ClientGoneError: Nobody is left to answer.
        """
        request_id = exchange.request_id
        mailbox = Mailbox(len(orders), streaming=stream)
        generations: list[Generation] = []
        for index, order in enumerate(orders):
            leader = generations[index - index % choices] if index % choices else None
            if leader is not None:
                leader.followers += 1
            generations.append(Generation(f"{request_id}-{index}", index, order, mailbox, leader))
        tasks = [
            asyncio.create_task(self._dispatcher.run(generation)) for generation in generations
        ]
        watch = asyncio.create_task(exchange.watch(mailbox.hang_up))
        self._open.add(mailbox)
        status = 0
        try:
            if stream:
                await self._stream(exchange, generations, shaper, mailbox, choices, usage_events)
            else:
                await self._once(exchange, generations, shaper, mailbox, choices, likeliest)
        except ClientGoneError:
            status = _CLIENT_GONE
            self._metrics.disconnects.inc()
            log.info("request %s: the client hung up", request_id)
            raise
        except ApiError as error:
            status = error.status
            raise
        else:
            status = exchange.status
        finally:
            self._open.discard(mailbox)
            watch.cancel()
            for task in tasks:
                task.cancel()
            self._count(generations)
            self._tell(exchange, generations, status)

    def _tell(self, exchange: Exchange, generations: Sequence[Generation], status: int) -> None:
        """Say that a request is over; what goes wrong with that is nothing to its client."""
        try:
            self._on_over(exchange, generations, status)
        except Exception:
            log.exception("request %s could not be explained", exchange.request_id)

    async def _once(
        self,
        exchange: Exchange,
        generations: Sequence[Generation],
        shaper: Shaper,
        mailbox: Mailbox,
        choices: int,
        likeliest: Likeliest | None,
    ) -> None:
        """Answer when everything is there."""
        pieces = await mailbox.take()
        if not pieces:
            raise ClientGoneError
        pieces.sort(key=lambda piece: piece.index)
        if likeliest is not None:
            pieces = likeliest.of(pieces, choices=choices)
        counts = _usage(generations, choices)
        # Before the client can ask its next turn.
        await self._remember(exchange, generations)
        await exchange.respond_json(200, shaper.answer(pieces, counts), _headers(generations))

    async def _stream(
        self,
        exchange: Exchange,
        generations: Sequence[Generation],
        shaper: Shaper,
        mailbox: Mailbox,
        choices: int,
        usage_events: bool,
    ) -> None:
        """Answer event by event."""
        begun = False
        while True:
            pieces = await mailbox.take()
            if not pieces:
                raise ClientGoneError
            ended = mailbox.ended
            events: list[msgspec.Struct] = []
            if not begun:
                begun = True
                await exchange.begin_stream(_headers(generations))
                events += shaper.opening(len(generations))
            for piece in pieces:
                events += shaper.events(piece)
            if ended:
                if usage_events:
                    events.append(shaper.closing(_usage(generations, choices)))
                await self._remember(exchange, generations)
                await exchange.end_stream(events)
                return
            await exchange.send_events(events)

    async def _remember(self, exchange: Exchange, generations: Sequence[Generation]) -> None:
        """Keep the ids of answers, for the next turn of their conversations, where there is time."""
        try:
            await exchange.in_time(_remembered(generations, exchange.caller.tenant))
        except ApiError as error:
            log.info("request %s is not remembered: %s", exchange.request_id, error)

    def _count(self, generations: Sequence[Generation]) -> None:
        """Count what was made, whether or not it was made to its end."""
        metrics = self._metrics
        now_s = time.monotonic()
        for generation in generations:
            started = generation.started
            if started is None or generation.first_token_s is None:
                continue
            arrived_s = generation.order.arrived_s
            metrics.first_token_s.observe(generation.first_token_s - arrived_s)
            metrics.duration_s.observe(now_s - arrived_s)
            metrics.output_tokens.inc(len(generation.output_ids))
            metrics.prompt_tokens.inc(len(generation.order.prompt.ids))
            metrics.predicted_tokens.inc(generation.predicted_tokens)
            if started.cached.device:
                metrics.cached_tokens.labels("device").inc(started.cached.device)
            for tier, tokens in loaded_tokens(started.cached).items():
                metrics.cached_tokens.labels(tier).inc(tokens)


async def _remembered(generations: Sequence[Generation], tenant: str) -> None:
    for generation in generations:
        order, text = generation.order, generation.text
        await order.model.prompts.remember(order.prompt, text, generation.output_ids, tenant=tenant)


def _headers(generations: Sequence[Generation]) -> dict[str, str]:
    """Return what an answer says of itself."""
    first = next((g for g in generations if g.started is not None), generations[0])
    return {
        "x-pie-worker": first.place or "",
        "x-pie-cached-tokens": str(first.cached_tokens),
        "x-pie-cached-from": _sources(first),
        "x-pie-load": told_load(first.started),
    }


def _sources(generation: Generation) -> str:
    """Return where cached tokens came from, such as `device=480,pool=32`."""
    if generation.started is None:
        return ""
    cached = generation.started.cached
    tiers = {"device": cached.device} | loaded_tokens(cached)
    return ",".join(f"{tier}={tokens}" for tier, tokens in tiers.items() if tokens)


def _usage(generations: Sequence[Generation], choices: int) -> Usage:
    """Return the counts of a request; a prompt counts once, whatever its choices."""
    firsts = generations[::choices]
    return usage(
        prompt=sum(len(generation.order.prompt.ids) for generation in firsts),
        completion=sum(len(generation.output_ids) for generation in generations),
        cached=sum(generation.cached_tokens for generation in firsts),
    )
