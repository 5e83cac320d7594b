"""`pie policy apply`, `diff`, `rollback`, `history` and what is in force: policies changed while everything serves.

Covers asking a router and what a person is told. Does not cover what a file may say
(`pie.policies.loader`) or how places come to run a version (`pie.index.policy_follower`).
"""

from __future__ import annotations

import difflib
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import httpx
import msgspec

from pie.cluster.asking import Trust, ask_router
from pie.cluster.errors import ConfigError, NotRunningError, UnansweredError, UncertainError
from pie.cluster.policy_command import BUILT_IN, checked, lines_of
from pie.cluster.policy_watch import WATCH_S, PolicyWatch
from pie.cluster.sentences import counted, printable, warn
from pie.index.policy_store import NOT_KNOWN
from pie.policies.errors import PolicyFileError
from pie.policies.loader import load_policies
from pie.policies.policy_set import PolicySet
from pie.router.api.policies import (
    Applied,
    ApplyBody,
    PolicyEvents,
    PolicyPlaceLine,
    PolicyReport,
    PolicyText,
)

_TIMEOUT_S = 15.0
_EVERYWHERE_S = 5.0
"""How long `apply` waits until all places run the new version."""
_LOOK_S = 0.1
_BROKEN_OFF = (
    httpx.codes.INTERNAL_SERVER_ERROR,
    httpx.codes.BAD_GATEWAY,
    httpx.codes.GATEWAY_TIMEOUT,
)
"""After which what was asked for may be done all the same."""
_PLACED = re.compile(r"[0-9]+:[0-9]+: ")
"""How a problem begins that has a line and a column."""

Say = Callable[[str], None]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Desk:
    """A router that policies are changed through."""

    url: str
    token: str
    trust: Trust = True
    folder: Path | None = None
    """Where modules may lie here that policies in force name: beside the file of this configuration."""

    def report(self, timeout_s: float = _TIMEOUT_S) -> PolicyReport:
        """Return versions and places.

        Raises:
            NotRunningError: No router answers there.
        """
        return self._ask("GET", PolicyReport, timeout_s=timeout_s)

    def text(self, version: int) -> str | None:
        """Return the text of a version; None where that is what each place's configuration names, or the built-ins for 0.

        Raises:
            NotRunningError: No router answers there, or it has no such version any more.
        """
        return self._ask("GET", PolicyText, below=f"/versions/{version}").text

    def events(self) -> PolicyEvents:
        """Return what cluster policies did lately, the newest first.

        Raises:
            NotRunningError: No router answers there.
        """
        return self._ask("GET", PolicyEvents, below="/events")

    def apply(self, text: str | None, note: str, *, name: str = "", check: bool = False) -> Applied:
        """Put a text in force, or only `check` it; return the version in force and warnings.

        Args:
            text: What a policy file says; None is what each place's configuration names.
            note: Where it comes from, for those who look at the versions.
            name: What problems and warnings call it; `note` where empty.
            check: Change nothing.

        Raises:
            ConfigError: The router does not take it; every problem at once.
            NotRunningError: No router answers there, and nothing has changed.
            UncertainError: It has not said whether it has put it in force.
        """
        name = name or note
        body = msgspec.json.encode(ApplyBody(text, note, check))
        try:
            applied = self._ask("POST", Applied, body=body)
        except ConfigError as error:
            # It was acceptable here: what is missing is missing there.
            told = [f"{_placed(name, one)} (at the router, {self.url})" for one in error.problems]
            raise ConfigError(told) from error
        except UnansweredError as error:
            if check:
                raise
            said = str(error)
            raise UncertainError(said if NOT_KNOWN in said else f"{said}; {NOT_KNOWN}") from error
        return Applied(applied.version, [_placed(name, one) for one in applied.warnings])

    def _ask(
        self,
        method: str,
        kind: type[T],
        *,
        below: str = "",
        body: bytes | None = None,
        timeout_s: float = _TIMEOUT_S,
    ) -> T:
        path = f"/admin/policies{below}"
        answer = ask_router(
            method,
            self.url,
            path,
            token=self.token,
            trust=self.trust,
            body=body,
            timeout_s=timeout_s,
        )
        if answer.is_good:
            return answer.read(kind)
        if answer.status == httpx.codes.BAD_REQUEST:
            raise ConfigError(answer.said.splitlines())
        told = f"{self.url}: {answer.said}"
        # A proxy says so of a router that may go on, and a router of Redis, which may have done it.
        raise UnansweredError(told) if answer.status in _BROKEN_OFF else NotRunningError(told)


def _placed(name: str, problem: str) -> str:
    return f"{name}:{'' if _PLACED.match(problem) else ' '}{problem}"


def apply_file(desk: Desk, file: Path, say: Say) -> bool:
    """Put a file in force everywhere, warn, and say which places run it; False where one is not known to.

    Raises:
        ConfigError: It is not acceptable, here or at the router; nothing has changed.
        NotRunningError: No router answers; nothing has changed.
        UncertainError: The router has not said whether it has put it in force.
    """
    return _applied(desk, checked(file).text, file.name, str(file), say)


def warnings(desk: Desk, file: Path, policies: PolicySet) -> list[str]:
    """Return what a router warns of in a file, and the policies that it names; nothing changes.

    Raises:
        ConfigError: It is not acceptable at the router.
        NotRunningError: No router answers.
    """
    return desk.apply(policies.text, file.name, name=str(file), check=True).warnings


def watch_file(desk: Desk, file: Path, say: Say) -> Iterator[None]:
    """Apply a file where it is not in force, now and whenever it has changed.

    What is wrong with it is said, and changes nothing. Yields between looks, for ever.
    """

    def take(text: str) -> list[str] | None:
        if text == _text_in_force(desk, desk.report().version):
            say(f"{file} is in force")
            return None
        applied = desk.apply(text, file.name, name=str(file))
        _followed(desk, applied.version, say)
        return applied.warnings

    def refuse(problems: Sequence[str]) -> None:
        for one in problems:
            say(one)

    watch = PolicyWatch(
        file,
        take=take,
        refuse=refuse,
        restored=lambda: say(f"{file} can be read again, and says what it said"),
        say=say,
        away=NotRunningError,
    )
    while True:
        watch.look()
        yield
        time.sleep(WATCH_S)


def roll_back(desk: Desk, to: int | None, say: Say) -> bool:
    """Put an earlier version in force anew; 0 is what every place's configuration names.

    Raises:
        ConfigError: There is no such version.
        NotRunningError: No router answers; nothing has changed.
        UncertainError: The router has not said whether it has put it in force.
    """
    report = desk.report()
    if to is None:
        if not report.version:
            raise ConfigError(["nothing was applied, so there is nothing to go back from"])
        to = _another_before(desk, report)
    versions = {one.version for one in report.versions} | {0}
    if to not in versions:
        known = ", ".join(map(str, sorted(versions)))
        raise ConfigError([f"there is no version {to}; there are {known}"])
    return _applied(desk, desk.text(to) if to else None, f"rollback to {to}", f"version {to}", say)


def _another_before(desk: Desk, report: PolicyReport) -> int:
    """Return the latest version before the one in force that says something else; 0 where none does."""
    now = desk.text(report.version)
    before = (one.version for one in report.versions if one.version < report.version)
    for version in sorted(before, reverse=True):
        if desk.text(version) != now:
            return version
    return 0


def history(desk: Desk) -> str:
    """Return lines about versions and places.

    Raises:
        NotRunningError: No router answers.
    """
    report = desk.report()
    lines = []
    for one in report.versions:
        when = datetime.fromtimestamp(one.applied_unix_s, UTC)
        mark = "*" if one.version == report.version else " "
        lines.append(
            f"{mark} {one.version:>4}  {when:%Y-%m-%d %H:%M:%S} UTC  {printable(one.note)}"
        )
    if not lines:
        lines.append("nothing was applied: every place runs what its configuration names")
    if report.refused is not None:
        when = datetime.fromtimestamp(report.refused.at_unix_s, UTC)
        lines.append(
            f"the edit of {report.refused.file} is refused ({when:%Y-%m-%d %H:%M:%S} UTC):"
        )
        lines += [f"  {one}" for one in report.refused.problems]
    width = max((len(place.place) for place in report.places), default=0)
    for place in report.places:
        lines.append(f"  {place.place:<{width}}  runs version {place.version}")
        if place.refused:
            lines.append(f"    and did not take {place.refused}: {printable(place.reason)}")
    return "\n".join(lines)


def events(desk: Desk) -> str:
    """Return lines about what cluster policies did lately, the newest last.

    Raises:
        NotRunningError: No router answers.
    """
    lines = []
    for one in reversed(desk.events().events):
        when = datetime.fromtimestamp(one.at_unix_s, UTC)
        what = ""
        if one.group:
            what = f"group {one.group[:16]} to {counted(one.copies, 'copy', 'copies')}: "
        if one.place:
            pages = f", {counted(one.pages, 'page')}" if one.pages else ""
            what = f"{one.place}{pages}: "
        if one.model:
            what = f"{one.model} to {counted(one.workers, 'worker')}: "
            if one.action == "lapse":
                what = f"{one.model}: "
        said = printable(f"{one.policy} {one.action}  {what}{one.reason}")
        lines.append(f"{when:%Y-%m-%d %H:%M:%S} UTC  {said}")
    return "\n".join(lines) or "cluster policies have done nothing"


def in_force(desk: Desk) -> str:
    """Return lines about each policy and rule in force, and which version that is.

    Where a module that they name is not here, the text of the version stands in place of the lines.

    Raises:
        NotRunningError: No router answers.
    """
    report = desk.report()
    text = _text_in_force(desk, report.version)
    notes = [printable(one.note) for one in report.versions if one.version == report.version]
    said = f"version {report.version}{f', {notes[0]}' if notes and notes[0] else ''}"
    if not report.version:
        said = "version 0, nothing was applied: what the router's configuration names"
    lines = [f"in force at {desk.url}: {said}", *([] if text else [f"  {BUILT_IN}"])]
    if report.file_differs:
        lines.insert(1, printable(report.file_differs))
    try:
        lines += lines_of(_as_here(text or "", f"version {report.version}", [desk.folder, None]))
    except PolicyFileError as error:
        lines += [
            "it cannot be read here; its text follows:",
            *(f"  {one}" for one in error.told()),
        ]
        lines += [printable(one) for one in (text or "").splitlines()]
    return "\n".join(lines)


def text_of(desk: Desk, version: int) -> str:
    """Return the text of a version, as it was applied; what each place's own file says has none.

    Raises:
        ConfigError: There is none that can be printed.
        NotRunningError: No router answers, or it has no such version any more.
    """
    text = desk.text(version)
    if text is None:
        said = "the built-ins, without a file" if not version else "what each place's own file says"
        raise ConfigError([f"version {version} has no text: it is {said}"])
    return text.removesuffix("\n")


@dataclass(frozen=True, slots=True)
class Difference:
    """What a file would change of what is in force."""

    text: str
    """Line by line; empty where it changes nothing."""
    warnings: list[str]
    """What the router warns of in the file."""


def difference(desk: Desk, file: Path) -> Difference:
    """Return what a file would change.

    Raises:
        ConfigError: It is not acceptable, here or at the router.
        NotRunningError: No router answers.
    """
    policies = checked(file)
    warned = warnings(desk, file, policies)
    version = desk.report().version
    name = f"version {version}" if version else "in force"
    text = _text_in_force(desk, version) or ""
    try:
        before = _as_here(text, name, [file.absolute().parent, desk.folder])
    except PolicyFileError as error:
        raise ConfigError(error.told()) from error
    old, new = (lines_of(one, shortly=True) for one in (before, policies))
    lines = difflib.unified_diff(old, new, name, str(file), lineterm="", n=0)
    return Difference("\n".join(lines), warned)


def _as_here(text: str, name: str, folders: Sequence[Path | None]) -> PolicySet:
    """Return the policies of a text in force, with the first of the folders that has its modules.

    Raises:
        PolicyFileError: None has them; what is wrong with the first.
    """
    first: PolicyFileError | None = None
    for folder in folders:
        try:
            return load_policies(text, name=name, folder=folder)
        except PolicyFileError as error:
            first = first or error
    assert first is not None
    raise first


def _applied(desk: Desk, text: str | None, note: str, name: str, say: Say) -> bool:
    applied = desk.apply(text, note, name=name)
    for warning in applied.warnings:
        warn(warning)
    return _followed(desk, applied.version, say)


def _followed(desk: Desk, version: int, say: Say) -> bool:
    """Say which places run a version, once they do or have been waited for; False where one is not known to."""
    say(f"version {version} is in force")
    until_s = time.monotonic() + _EVERYWHERE_S
    while True:
        is_over = time.monotonic() > until_s
        try:
            report = desk.report(_EVERYWHERE_S)
        except NotRunningError as error:
            if is_over:
                say(f"  which places run it is not known: {error}; `pie policy history` says")
                return False
        else:
            if report.version > version:
                say(f"  {_overtaken(report)}")
                return False
            if is_over and report.version < version:
                say(
                    f"  it is in force no longer, for Redis has lost it: version {report.version} is; "
                    "apply it again"
                )
                return False
            if is_over or all(version in (one.version, one.refused) for one in report.places):
                return _is_everywhere(report.places, version, say)
        time.sleep(_LOOK_S)


def _is_everywhere(places: Sequence[PolicyPlaceLine], version: int, say: Say) -> bool:
    for one in places:
        if one.version == version:
            say(f"  {one.place} runs it")
        elif one.refused == version:
            say(f"  {one.place} does not take it and runs version {one.version}: {one.reason}")
        else:
            say(f"  {one.place} has not said yet that it runs it; it runs version {one.version}")
    return all(one.version == version for one in places)


def _overtaken(report: PolicyReport) -> str:
    notes = [printable(one.note) for one in report.versions if one.version == report.version]
    note = f" ({notes[0]})" if notes and notes[0] else ""
    return f"version {report.version}{note} was applied meanwhile, and is in force in its place"


def _text_in_force(desk: Desk, version: int) -> str | None:
    """Return the text that is in force; None where it is the built-ins."""
    text = desk.text(version) if version else None
    return desk.text(0) if text is None else text
