"""A user's code run by a deadline while a policy file is read or put in force: imports of modules, classes tried once, policies made.

Covers running each piece on a thread of its own, waiting no longer than what one file may take in all, and going on
with an import that an earlier file began; and which modules have changed on disk since they were loaded. Does not cover what is imported (`pie.policies.registry`) or a policy
that is asked while serving (`pie.policies.aside`).

An import that is late is not broken off, because what it imports itself would be left half done in a process that
serves: it goes on beside, and is there for the next file once it is over. A module that is loaded is not loaded again.
What makes a policy that is to serve is ended, for nobody would take what it makes.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Hashable
from pathlib import Path
from types import ModuleType
from typing import Generic, TypeVar, cast

from pie.policies.ending import Endable
from pie.policies.errors import PolicyError

MODULES = "pie_user_policies."
"""What users' modules that lie beside a policy file are called before their own name."""
LIMIT_S = 10.0
"""What all user's code of one file may take. A router answers `pie policy apply` within that and a little more."""
_LEAST_S = 0.1
"""What each piece has, also where earlier ones have taken all of it: what is imported already is there at once."""

_T = TypeVar("_T")
_running: dict[Hashable, _Piece[object]] = {}
_stuck: set[Hashable] = set()
"""Names of what was to be made, is late and has not ended yet."""
_lock = threading.Lock()
_loaded: dict[str, tuple[Path, bytes]] = {}
"""Each module's file, and the digest of what was in it when it was loaded."""


class LateError(PolicyError):
    """A piece of user's code has not come back in time."""


class UserCode:
    """Runs the user's code that one policy file names.

    Args:
        limit_s: What all of it may take; `LIMIT_S` where None.
    """

    def __init__(self, limit_s: float | None = None) -> None:
        self.limit_s = LIMIT_S if limit_s is None else limit_s
        self.is_late = False
        """Whether some of it has not come back."""
        self.changed: list[Path] = []
        """Files that are no longer what was loaded of them, each once."""
        self._until_s = time.monotonic() + self.limit_s

    def look_at(self, module: ModuleType) -> None:
        """See whether the file of a module, which is loaded, has changed since."""
        file = Path(getattr(module, "__file__", None) or "")
        known = _loaded.get(module.__name__)
        if known is None or known[0] != file:
            note_loaded(module.__name__, file)
        elif known[1] != _digest(file) and file not in self.changed:
            self.changed.append(file)

    def run(self, name: Hashable, work: Callable[[], _T]) -> _T:
        """Return what a piece of code does, or what one of the same name does that runs already.

        Raises:
            LateError: It has not come back in time; it goes on by itself.
            RuntimeError: No more threads can be started; it has not run, and may be tried again.
            BaseException: What it raised.
        """
        with _lock:
            piece = _running.get(name)
            if piece is None:
                piece = _Piece(name, work)
                piece.start()
                _running[name] = piece
        if not piece.over.wait(max(_LEAST_S, self._until_s - time.monotonic())):
            self.is_late = True
            raise LateError(f"has not come back in {self.limit_s:g} s, and goes on by itself")
        if piece.error is not None:
            raise piece.error
        return cast(_T, piece.result)


def made(name: Hashable, work: Callable[[], _T]) -> _T:
    """Return what a user's class makes; other than with `UserCode.run`, each call has one of its own.

    Raises:
        LateError: It has not come back in `LIMIT_S` and was told to end; or an earlier one of this name has not ended yet.
        RuntimeError: No more threads can be started.
        BaseException: What it raised.
    """
    endable, given_up = Endable(), threading.Event()

    def begin() -> _T:
        # What has not begun by then could not be told to end.
        if given_up.is_set():
            raise LateError("was given up before it began")
        return work()

    piece = _Piece((name, endable), lambda: endable.run(begin), stuck_as=name)
    with _lock:
        is_stuck = name in _stuck
        if not is_stuck:
            piece.start()
            _running[piece.name] = cast(_Piece[object], piece)
    if is_stuck or not piece.over.wait(LIMIT_S):
        with _lock:
            if piece.name in _running:
                _stuck.add(name)
        given_up.set()
        endable.end()
        raise LateError(f"has not come back in {LIMIT_S:g} s")
    if piece.error is not None:
        raise piece.error
    return cast(_T, piece.result)


def note_loaded(name: str, file: Path) -> None:
    """Remember what is in the file of a module that is being loaded."""
    _loaded[name] = (file, _digest(file))


def _digest(file: Path) -> bytes:
    """Return a digest of a file; of nothing where it cannot be read."""
    try:
        return hashlib.sha256(file.read_bytes()).digest()
    except OSError:
        return b""


class _Piece(Generic[_T]):
    def __init__(
        self, name: Hashable, work: Callable[[], _T], *, stuck_as: Hashable = None
    ) -> None:
        self.name = name
        self._work = work
        self._stuck_as = stuck_as
        self.over = threading.Event()
        self.result: _T | None = None
        self.error: BaseException | None = None

    def start(self) -> None:
        # It ends with the process: a command that has told what is wrong does not wait for it.
        threading.Thread(target=self._run, name="pie-user-code", daemon=True).start()

    def _run(self) -> None:
        try:
            self.result = self._work()
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is the user's code's
            self.error = error
        with _lock:
            del _running[self.name]
            _stuck.discard(self._stuck_as)
        self.over.set()
