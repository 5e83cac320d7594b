"""What a tenant may take, against a plain count of what it took at all routers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from pie.index.allowance import Claim, Draw, Grant, Limits, MemoryAllowances
from pie.index.errors import IndexUnavailableError
from pie.router.errors import ApiError
from pie.router.key_file import Tenant
from pie.router.quota import Quota


class Clock:
    """A time that a test sets."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Routers:
    """Quotas of one tenant at several routers, and a count of what was let in."""

    def __init__(self, count: int, tenant: Tenant) -> None:
        self.clock = Clock()
        self.tenant = tenant
        first = MemoryAllowances("0", self.clock)
        shared = [first, *(first.beside(str(n)) for n in range(1, count))]
        self.quotas = [Quota("t", tenant, one, self.clock) for one in shared]
        self.let_in: list[tuple[float, int]] = []
        self.prompts: list[tuple[float, int]] = []

    async def enter(self, at: int, sequences: int) -> bool:
        try:
            await self.quotas[at].enter(sequences)
        except ApiError:
            return False
        self.let_in.append((self.clock.now_s, 1))
        return True

    async def prompt(self, at: int, tokens: int) -> bool:
        try:
            await self.quotas[at].prompt(tokens)
        except ApiError:
            return False
        self.prompts.append((self.clock.now_s, tokens))
        return True


async def settled() -> None:
    """Let what goes on beside the test have its turn."""
    for _ in range(4):
        await asyncio.sleep(0)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["enter", "leave", "prompt", "answered", "wait"]),
        st.integers(0, 3),
        st.integers(1, 40),
    ),
    max_size=60,
)


@settings(deadline=None, max_examples=60)
@given(STEPS, st.sampled_from([2, 30, 600]), st.sampled_from([20, 2_000]), st.integers(1, 6))
def test_no_order_of_requests_at_four_routers_lets_more_in_than_one_bucket_does(
    steps: list[tuple[str, int, int]], requests: int, tokens: int, concurrent: int
) -> None:
    async def run() -> None:
        limits = Tenant(
            "salt",
            requests_per_minute=requests,
            tokens_per_minute=tokens,
            concurrent=concurrent,
        )
        routers = Routers(4, limits)
        inside = [0] * 4
        spent = 0
        for what, at, amount in steps:
            now_s = routers.clock.now_s
            if what == "wait":
                routers.clock.now_s += amount / 2
                # As the router does that has some in flight, three times in the time that they count.
                for quota in routers.quotas:
                    if not quota.is_settled:
                        await quota.settle()
            elif what == "leave":
                if inside[at]:
                    routers.quotas[at].leave(1)
                    inside[at] -= 1
            elif what == "answered":
                routers.quotas[at].answered(amount)
                spent += amount
            elif what == "enter":
                inside[at] += await routers.enter(at, 1)
            elif await routers.prompt(at, amount):
                # What is larger than a bucket waits for a full one.
                assert spent + min(amount, tokens) <= tokens + now_s * tokens / 60 + 1e-6
                spent += amount
            await settled()
            assert [quota.inside for quota in routers.quotas] == inside
            assert sum(inside) <= concurrent
            now_s = routers.clock.now_s
            assert len(routers.let_in) <= requests + now_s * requests / 60 + 1e-6
            # In any stretch of time, what all routers had at hand at its beginning comes to that.
            at_hand = 4 * (requests // 128)
            for begun_s in {at_s for at_s, _ in routers.let_in}:
                since = sum(1 for at_s, _ in routers.let_in if at_s >= begun_s)
                assert since <= requests + at_hand + (now_s - begun_s) * requests / 60 + 1e-6

    asyncio.run(run())


async def test_waiting_as_told_is_enough() -> None:
    routers = Routers(2, Tenant("salt", requests_per_minute=7))
    for turn in range(60):
        try:
            await routers.quotas[turn % 2].enter(1)
        except ApiError as error:
            routers.clock.now_s += int(error.headers["retry-after"])
            await routers.quotas[turn % 2].enter(1)
        assert turn + 1 <= 7 + routers.clock.now_s * 7 / 60


async def test_an_answers_tokens_delay_what_comes_later_at_another_router() -> None:
    routers = Routers(2, Tenant("salt", tokens_per_minute=60))
    one, other = routers.quotas
    await one.prompt(10)
    one.answered(80)
    await settled()
    with pytest.raises(ApiError) as refused:
        await other.prompt(1)
    assert refused.value.headers == {"retry-after": "31"}
    routers.clock.now_s = 31.0
    await other.prompt(1)


async def test_a_refused_prompt_is_refused_again_without_asking_and_a_smaller_one_is_not() -> None:
    routers = Routers(1, Tenant("salt", tokens_per_minute=60))
    (quota,) = routers.quotas
    await quota.prompt(40)
    for _ in range(2):
        with pytest.raises(ApiError) as refused:
            await quota.prompt(30)
        assert refused.value.headers == {"retry-after": "10"}
    await quota.prompt(20)


async def test_what_is_refused_is_not_counted() -> None:
    routers = Routers(1, Tenant("salt", requests_per_minute=1, concurrent=2))
    (quota,) = routers.quotas
    with pytest.raises(ApiError, match="more than the 2"):
        await quota.enter(3)
    await quota.enter(1)
    for at_s in (0.0, 59.0):
        routers.clock.now_s = at_s
        with pytest.raises(ApiError, match="1 requests a minute"):
            await quota.enter(1)
    assert quota.inside == 1
    routers.clock.now_s = 61.0
    await quota.enter(1)
    assert quota.inside == 2
    routers.clock.now_s = 181.0
    with pytest.raises(ApiError, match="2 sequences in flight, of 2"):
        await quota.enter(1)


async def test_a_changed_limit_keeps_what_was_taken() -> None:
    routers = Routers(1, Tenant("salt", requests_per_minute=2))
    (quota,) = routers.quotas
    await quota.enter(1)
    quota.limit(Tenant("salt", requests_per_minute=4))
    for _ in range(3):
        await quota.enter(1)
    with pytest.raises(ApiError, match="4 requests a minute"):
        await quota.enter(1)
    quota.limit(Tenant("salt"))
    await quota.enter(1)


class Slow(MemoryAllowances):
    """Answers after a turn of the loop, and counts claims."""

    claims = 0

    def __init__(self, holder: str, clock: Callable[[], float]) -> None:
        super().__init__(holder, clock)
        self.begun = asyncio.Event()

    async def claim(self, tenant: str, limits: Limits, claim: Claim) -> Grant:
        self.claims += 1
        self.begun.set()
        await asyncio.sleep(0)
        return await super().claim(tenant, limits, claim)


async def test_many_at_once_ask_few_times_and_get_all_there_is() -> None:
    clock = Clock()
    slow = Slow("0", clock)
    quota = Quota("t", Tenant("salt", requests_per_minute=500, concurrent=400), slow, clock)

    async def one() -> bool:
        try:
            await quota.enter(1)
        except ApiError:
            return False
        return True

    let_in = await asyncio.gather(*(one() for _ in range(600)))
    assert sum(let_in) == quota.inside == 400
    for _ in range(400):
        quota.leave(1)
    await settled()
    assert quota.is_settled
    claims = slow.claims
    await quota.enter(1)
    assert slow.claims <= claims + 1


async def test_what_is_counted_on_by_one_that_draws_is_not_taken_by_another() -> None:
    clock = Clock()
    slow = Slow("0", clock)
    quota = Quota("t", Tenant("salt", tokens_per_minute=1_280), slow, clock)
    await quota.prompt(1)  # Ten more are at hand now.
    taken = Claim(tokens=Draw(need=1_179))
    assert (await slow.beside("1").claim("t", Limits(0, 1_280), taken)).is_given
    results = await asyncio.gather(quota.prompt(100), quota.prompt(10), return_exceptions=True)
    assert results[0] is None
    assert isinstance(results[1], ApiError)


async def test_a_request_that_is_given_up_while_it_draws_holds_nothing() -> None:
    clock = Clock()
    slow = Slow("0", clock)
    quota = Quota("t", Tenant("salt", concurrent=1), slow, clock)
    entering: asyncio.Task[None] = asyncio.create_task(quota.enter(1))
    await slow.begun.wait()
    entering.cancel()
    await asyncio.gather(entering, return_exceptions=True)
    await settled()
    await settled()
    other = Quota("t", Tenant("salt", concurrent=1), slow.beside("1"), clock)
    await other.enter(1)


async def test_what_is_being_given_back_is_not_taken_meanwhile() -> None:
    clock = Clock()
    slow = Slow("0", clock)
    quota = Quota("t", Tenant("salt", concurrent=1), slow, clock)
    await quota.enter(1)
    slow.begun.clear()
    quota.leave(1)
    await slow.begun.wait()
    await quota.enter(1)
    other = Quota("t", Tenant("salt", concurrent=1), slow.beside("1"), clock)
    with pytest.raises(ApiError, match="1 sequences in flight, of 1"):
        await other.enter(1)


async def test_a_tenant_without_limits_costs_nobody_anything() -> None:
    slow = Slow("0", Clock())
    quota = Quota("t", Tenant("salt"), slow)
    await quota.enter(3)
    await quota.prompt(1_000)
    quota.answered(1_000)
    await settled()
    assert quota.is_settled
    assert not slow.claims


async def test_a_limit_that_comes_back_holds_nothing_of_the_former_one() -> None:
    routers = Routers(2, Tenant("salt", concurrent=2))
    one, other = routers.quotas
    await one.enter(2)
    one.limit(Tenant("salt"))
    one.leave(2)
    routers.clock.now_s = 31.0
    await other.enter(2)
    one.limit(Tenant("salt", concurrent=2))
    with pytest.raises(ApiError, match="2 sequences in flight"):
        await one.enter(1)


async def test_a_request_that_draws_leaves_refused_tokens_refused() -> None:
    slow = Slow("0", Clock())
    quota = Quota("t", Tenant("salt", requests_per_minute=9, tokens_per_minute=60), slow, Clock())
    await quota.prompt(60)
    with pytest.raises(ApiError, match="60 tokens a minute"):
        await quota.prompt(30)
    await quota.enter(1)
    claims = slow.claims
    with pytest.raises(ApiError, match="60 tokens a minute"):
        await quota.prompt(30)
    assert slow.claims == claims


class Away(MemoryAllowances):
    """Never answers with anything."""

    def claim(self, tenant: str, limits: Limits, claim: Claim) -> Coroutine[Any, Any, Grant]:
        del tenant, limits, claim
        raise IndexUnavailableError("away")


async def test_settling_with_nobody_there_goes_on_later() -> None:
    quota = Quota("t", Tenant("salt", tokens_per_minute=1), Away("0"))
    quota.answered(5)
    await settled()
    assert not quota.is_settled
