"""The zmq context of this process.

Covers one context, and so one I/O thread, for all sockets that are open, and none when none is.
"""

from __future__ import annotations

import asyncio
import threading

import zmq

from pie.wire import freed_memory

# A client takes three sockets: its own and the two ends of its monitor.
_MAX_SOCKETS = 8192

_lock = threading.Lock()
_context: zmq.Context[zmq.Socket[bytes]] | None = None
_users = 0
_helpers: list[threading.Thread] = []


def acquire() -> zmq.Context[zmq.Socket[bytes]]:
    """Return the context; `release` it when the socket is closed."""
    global _context, _users  # noqa: PLW0603 - one per process is the point
    with _lock:
        if _context is None:
            freed_memory.keep()
            _context = zmq.Context()
            _context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
        _users += 1
        return _context


def help_with(thread: threading.Thread) -> None:
    """Start a thread that ends with the context: when a call of its raises `ContextTerminated`."""
    with _lock:
        _helpers.append(thread)
    thread.start()


async def release() -> None:
    """Give the context back; the last one ends it and its threads."""
    global _context, _users  # noqa: PLW0603
    with _lock:
        _users -= 1
        if _users or _context is None:
            return
        ending, _context = _context, None
        helpers = _helpers.copy()
        _helpers.clear()
    loop = asyncio.get_running_loop()
    done = asyncio.Event()

    def end() -> None:
        # Waits until closed sockets have sent what they had, for as long as their linger says.
        ending.term()
        for helper in helpers:
            helper.join()
        if not loop.is_closed():
            loop.call_soon_threadsafe(done.set)

    thread = threading.Thread(target=end, name="pie-wire-end", daemon=True)
    thread.start()
    await done.wait()
    thread.join()
