"""A program that misbehaves harms itself: it ends with a reason, its pages are free, others go on."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest
from pydantic import ByteSize

from pie.worker.programs.host import TooManyPrograms
from pie.worker.programs.local import LocalEngine
from pie.worker.programs.process import EndReason
from pie.worker.settings import ProgramSettings
from tests.inferlet.running import ENDS_S, run, start, until_idle

pytestmark = pytest.mark.asyncio(loop_scope="session")

GOOD = """
    from pie.inferlet import Context, greedy

    async def main(ctx: Context):
        return await ctx.user("Still there?").generate(greedy(), max_tokens=4)
    """


@contextmanager
def limits(local: LocalEngine, **changes: object) -> Iterator[None]:
    """Start programs with other limits meanwhile."""
    before = local.host._settings
    local.host._settings = ProgramSettings.model_validate(before.model_dump() | changes)
    yield
    local.host._settings = before


async def test_processes_cannot_be_started(local: LocalEngine) -> None:
    ran = await run(
        local,
        """
        import os, subprocess, sys, threading

        async def main(ctx):
            told = []
            for attempt in (
                os.fork,
                lambda: subprocess.run([sys.executable, "-c", ""]),
                lambda: os.execv("/bin/sh", ["sh"]),
                lambda: os.posix_spawn("/bin/sh", ["sh"], {}),
            ):
                try:
                    attempt()
                    told.append("went")
                except OSError as error:
                    told.append(type(error).__name__)
            one = threading.Thread(target=lambda: told.append("thread"))
            one.start(); one.join()
            return " ".join(told)
        """,
    )
    assert ran.result == " ".join(["PermissionError"] * 4 + ["thread"])


async def test_a_fork_bomb_stays_one_process(local: LocalEngine) -> None:
    before = len(psutil.Process().children(recursive=True))
    ran = await run(
        local,
        """
        import os

        async def main(ctx):
            for _ in range(10_000):
                try:
                    os.fork()
                except OSError:
                    pass
            return len(os.listdir("/proc")) if os.access("/proc", os.R_OK) else "alone"
        """,
    )
    assert ran.ended.reason is not EndReason.DIED
    assert len(psutil.Process().children(recursive=True)) <= before


async def test_memory_is_limited(local: LocalEngine) -> None:
    ran = await run(local, "async def main(ctx):\n    return len(bytearray(10 * 2**30))\n")
    assert ran.ended.reason is EndReason.RAISED
    assert "MemoryError" in ran.ended.error


async def test_a_program_that_fills_memory_bit_by_bit_ends(local: LocalEngine) -> None:
    ran = await run(
        local,
        "async def main(ctx):\n    kept = []\n    while True:\n        kept.append(b'x' * 2**20 * (1 + len(kept) % 2))\n",
    )
    assert ran.ended.reason in (EndReason.RAISED, EndReason.DIED)
    await run(local, GOOD)


async def test_an_endless_loop_ends_with_its_time(local: LocalEngine) -> None:
    source = """
        from pie.inferlet import ForwardPass

        async def main(ctx):
            await ctx.pipeline().run(ForwardPass(ctx.new_working_set()).input(range(9, 200)))
            while True:
                pass
        """
    with limits(local, wall_s=3):
        ran = await run(local, source)
    assert ran.ended.reason is EndReason.TOO_LONG
    assert "longer than the 3.0 s" in ran.ended.error
    await until_idle(local)


async def test_cpu_time_is_limited(local: LocalEngine) -> None:
    with limits(local, cpu_s=1):
        ran = await run(local, "async def main(ctx):\n    while True: pass\n")
        deaf = await run(
            local,
            """
            import signal
            async def main(ctx):
                signal.signal(signal.SIGXCPU, signal.SIG_IGN)
                while True: pass
            """,
        )
    assert ran.ended.reason is EndReason.TOO_MUCH_CPU
    assert deaf.ended.reason is EndReason.TOO_MUCH_CPU


async def test_output_is_limited(local: LocalEngine) -> None:
    with limits(local, output=ByteSize(10_000)):
        printed = await run(local, "async def main(ctx):\n    while True: print('x' * 1000)\n")
        said = await run(local, "async def main(ctx):\n    while True: await ctx.say('x' * 1000)\n")
    assert printed.ended.reason is EndReason.TOO_MUCH_OUTPUT
    assert len(printed.ended.output) == 10_000
    assert said.ended.reason is EndReason.TOO_MUCH_OUTPUT
    assert len(said.said) == 10


async def test_files_sockets_and_other_processes_are_out_of_reach(local: LocalEngine) -> None:
    ran = await run(
        local,
        f"""
        import os, signal, socket, tempfile, resource

        async def main(ctx):
            told = []
            for attempt in (
                lambda: open("/etc/passwd").read(),
                lambda: os.listdir("/proc"),
                lambda: os.listdir("/tmp"),
                lambda: open("/tmp/inferlet-was-here", "w"),
                lambda: socket.create_connection(("127.0.0.1", 80)),
                lambda: socket.socket(socket.AF_UNIX),
                lambda: os.kill({os.getpid()}, 0),
                lambda: os.kill(-1, signal.SIGTERM),
                lambda: open("/proc/{os.getpid()}/mem", "rb"),
                lambda: resource.setrlimit(resource.RLIMIT_AS, (-1, -1)),
            ):
                try:
                    attempt()
                    told.append("went")
                except (OSError, ValueError) as error:
                    told.append("no")
            return " ".join(told)
        """,
    )
    assert ran.result == " ".join(["no"] * 10)


async def test_another_programs_working_sets_are_not_to_be_named(local: LocalEngine) -> None:
    waiting = await start(
        local,
        """
        from pie.inferlet import ForwardPass

        async def main(ctx):
            await ctx.pipeline().run(ForwardPass(ctx.working_set).input(range(9, 60)))
            await ctx.say("ready")
            await ctx.listen()
            return ctx.working_set.length
        """,
    )
    ran = await run(
        local,
        """
        from pie.inferlet import BadCallError, ForwardPass, StateGeometry
        from pie.inferlet.working_set import WorkingSet

        async def main(ctx):
            told = 0
            for number in range(2, 300):
                one = WorkingSet(ctx.connection(), number)
                try:
                    await one.drop([0])
                except BadCallError:
                    told += 1
            return told
        """,
    )
    assert ran.result == "298"
    waiting.tell(None)
    async with asyncio.timeout(ENDS_S):
        assert (await waiting.ended).result == "51"


@pytest.mark.parametrize("after_s", [0.0, 0.2, 0.6, 1.2])
async def test_killed_at_any_moment_a_program_leaves_nothing(
    local: LocalEngine, after_s: float
) -> None:
    running = await start(
        local,
        """
        import asyncio
        from pie.inferlet import Sampler

        async def main(ctx):
            while True:
                ctx.user("And then? " * 30)
                forks = await ctx.fork(3)
                await asyncio.gather(*(fork.generate(Sampler(), max_tokens=40) for fork in forks))
                for fork in forks:
                    fork.working_set.drop(fork.working_set.slots[5:20])
                    await fork.working_set.compact()
                    fork.close()
        """,
    )
    await asyncio.sleep(after_s)
    assert running.process._process is not None
    os.kill(running.process._process.pid, signal.SIGKILL)
    async with asyncio.timeout(ENDS_S):
        ended = await running.ended
    assert ended.reason is EndReason.DIED
    assert "signal 9" in ended.error
    await until_idle(local)
    assert (await run(local, GOOD)).result is not None


async def test_a_program_that_is_cancelled_says_so(local: LocalEngine) -> None:
    running = await start(local, "async def main(ctx):\n    await ctx.listen()\n")
    running.cancel()
    async with asyncio.timeout(ENDS_S):
        assert (await running.ended).reason is EndReason.CANCELLED


async def test_garbage_on_the_pipe_ends_the_program(local: LocalEngine) -> None:
    ran = await run(
        local,
        """
        async def main(ctx):
            ctx.connection()._pipe._writer.write(b"\\xff" * 64)
            await ctx.listen()
        """,
    )
    assert ran.ended.reason is not EndReason.FINISHED
    await run(local, GOOD)


async def test_no_more_programs_run_than_may(local: LocalEngine) -> None:
    with limits(local, most=1):
        first = await start(local, "async def main(ctx):\n    await ctx.listen()\n")
        with pytest.raises(TooManyPrograms, match="1 programs run already"):
            await start(local, GOOD)
    first.cancel()
    async with asyncio.timeout(ENDS_S):
        await first.ended
