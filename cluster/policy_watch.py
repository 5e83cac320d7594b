"""The policy file of a cluster that serves: what changes in one that is watched takes effect.

Covers noticing that a file has changed, however it was edited (written in place, replaced by another, or
reached through a link that was turned, as those of a ConfigMap are), and for `pie serve` putting it in
force through Redis; and of one that is not watched, that something else is in force. Does not cover what a file may say (`pie.policies.loader`) or how places come to run a
version (`pie.index.policy_follower`).
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from pie.cluster.errors import ConfigError
from pie.index.errors import PageIndexError
from pie.index.policy_store import PolicyStore
from pie.index.settings import IndexSettings
from pie.policies.document import MAX_BYTES
from pie.policies.errors import PolicyFileError, PolicyLateError
from pie.policies.loader import load_policies
from pie.policies.telling import told
from pie.policies.versions import differs

log = logging.getLogger("pie.cluster.policy_watch")

WATCH_S = 0.5
"""How often a file is looked at."""
_SETTLES_S = 0.1
"""An edit is over once the file has been the same for so long."""
_ENDS_S = 10.0

Say = Callable[[str], object]


class _StrangeError(Exception):
    """What a file says could not be handed on, for a reason that nobody has foreseen."""


class PolicyWatch:
    """Hands on what a file says whenever that has changed.

    Args:
        file: The file, by the path that it is looked for at each time.
        take: Called with its text where it is acceptable; returns what to warn of where it knows more than
            the text alone tells. May raise `ConfigError` where it is not.
        refuse: Called with all that is wrong with it, or that it cannot be read.
        restored: Called where it could not be read and now says again what was taken last.
        say: Told of warnings, or once that nobody takes it now.
        away: Raised by `take` and `refuse` where the text is to be offered again at the next look.
    """

    def __init__(
        self,
        file: Path,
        *,
        take: Callable[[str], Sequence[str] | None],
        refuse: Callable[[Sequence[str]], None],
        restored: Callable[[], None],
        say: Say,
        away: type[Exception],
    ) -> None:
        self._file = file
        self._take = take
        self._refuse = refuse
        self._restored = restored
        self._say = say
        self._away = away
        self._seen: bytes | None = None
        self._is_taken = False
        """Whether what was seen last was acceptable."""
        self._unread = ""
        """Why the file cannot be read, once that was told."""
        self._late: bytes | None = None
        """What was refused because code that it names had not come back: it is offered again."""
        self._said = ""

    def look(self) -> None:
        """Look at the file once; one that is being written is left for the next look."""
        try:
            content = self._read()
            is_new = content not in (self._seen, self._late)
            if is_new:
                # One that is written in place is empty for a moment, or half of what it will be.
                time.sleep(_SETTLES_S)
                if content != self._read():
                    return
        except OSError as error:
            self._settle_unread(f"{self._file}: cannot be read: {error.strerror or error}")
            return
        if is_new or content == self._late or (self._unread and not self._is_taken):
            self._offer(content)
        elif self._unread and self._told(self._restored):
            self._unread = ""

    def _settle_unread(self, why: str) -> None:
        """Tell that the file cannot be read, unless it was only being replaced."""
        if why == self._unread:
            return
        time.sleep(_SETTLES_S)
        with contextlib.suppress(OSError):
            self._read()
            return
        if self._told(functools.partial(self._refuse, [why])):
            # Late code is told anew, in place of this, once the file is back.
            self._unread, self._late = why, None

    def _read(self) -> bytes:
        if stat.S_ISFIFO(self._file.stat().st_mode):
            # It would be waited for without end.
            raise OSError(errno.EINVAL, "it is a pipe")
        with self._file.open("rb") as stream:
            # A byte more than allowed tells that there is too much, however large the file.
            return stream.read(MAX_BYTES + 1)

    def _offer(self, content: bytes) -> None:
        try:
            is_told = self._told(functools.partial(self._hand_on, content))
        except (PolicyLateError, _StrangeError):
            self._late, self._unread = content, ""
        else:
            if is_told:
                self._seen, self._late, self._unread, self._said = content, None, "", ""

    def _told(self, tell: Callable[[], None]) -> bool:
        """Return whether somebody could be told; what is not is told at the next look."""
        try:
            tell()
        except self._away as error:
            self._say_once(str(error))
            return False
        return True

    def _hand_on(self, content: bytes) -> None:
        is_taken = False
        try:
            policies = load_policies(
                content, name=str(self._file), folder=self._file.absolute().parent
            )
            assert policies.text is not None
            warnings = self._take(policies.text)
            if warnings is None:
                warnings = [one.told(str(self._file)) for one in policies.warnings]
            for warning in warnings:
                self._say(f"warning: {warning}")
            is_taken = True
        except PolicyLateError as error:
            if content != self._late:
                self._refuse(error.told())
            raise
        except PolicyFileError as error:
            self._refuse(error.told())
        except ConfigError as error:
            self._refuse(error.problems)
        except self._away:
            raise
        except Exception as error:
            # Whatever it is, it is the edit's, and may be over at another look.
            if content != self._late:
                self._refuse([f"{self._file}: cannot be taken: {told(error)}"])
            raise _StrangeError from error
        self._is_taken = is_taken

    def _say_once(self, text: str) -> None:
        if text != self._said:
            self._said = text
            self._say(text)


class ServedPolicies:
    """What `pie serve` does about its file; where that is watched, on a thread of its own.

    Args:
        file: The file.
        own: What it said when the cluster's parts were made.
        index_url: Redis.
        index: Key prefix and time limits.
        report: Told of versions, and of what is wrong.
    """

    def __init__(
        self, file: Path, own: str | None, index_url: str, index: IndexSettings, report: Say
    ) -> None:
        self._file = file
        self._own = own
        self._index_url = index_url
        self._index = index
        self._report = report
        self._over = threading.Event()
        self._watch = PolicyWatch(
            file,
            take=self._take,
            refuse=self._refuse,
            restored=self._restored,
            say=report,
            away=PageIndexError,
        )
        self._thread = threading.Thread(target=self._run, name="policies", daemon=True)

    def tell(self) -> None:
        """Say of a file that is not watched that another version is in force than it says."""
        with contextlib.suppress(PageIndexError), self._store() as store:
            number = store.current()
            version = store.version(number) if number else None
            text = None if version is None else version.text
            if told := differs(number, text, self._own, str(self._file)):
                self._report(told)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def close(self) -> None:
        """Watch no longer."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(_ENDS_S)

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                self._watch.look()
            except Exception:
                log.exception("the policy file could not be looked at")
            self._over.wait(WATCH_S)

    def _take(self, text: str) -> None:
        with self._store() as store:
            number = store.current()
            version = store.version(number) if number else None
            in_force = self._own if version is None or version.text is None else version.text
            if text == in_force:
                store.accept()
            else:
                number = store.apply(text, self._file.name)
                self._report(f"version {number} is in force, from {self._file}")

    def _refuse(self, problems: Sequence[str]) -> None:
        with self._store() as store:
            store.refuse(self._file.name, problems)
        self._report(f"an edit of {self._file} changes nothing:")
        for problem in problems:
            self._report(problem)

    def _restored(self) -> None:
        with self._store() as store:
            store.accept()
        self._report(f"{self._file} can be read again, and says what it said")

    @contextlib.contextmanager
    def _store(self) -> Iterator[PolicyStore]:
        store = PolicyStore(self._index_url, self._index)
        try:
            yield store
        finally:
            store.close()
