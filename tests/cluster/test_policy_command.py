"""`pie policy`: what it says of policy files."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner, Result

from pie.cluster.asking import Answer, ask_router
from pie.cluster.cli import app
from pie.cluster.errors import ConfigError, UnansweredError
from pie.cluster.policy_command import checked, read, summary
from pie.cluster.policy_edit import Desk, events, watch_file
from pie.policies.errors import PolicyFileError
from pie.policies.policy_set import PolicySet
from pie.policies.versions import PolicyVersions
from pie.router.api.policies import (
    Applied,
    PolicyEventLine,
    PolicyEvents,
    PolicyPlaceLine,
    PolicyReport,
    PolicyText,
    PolicyVersionLine,
)
from tests.support.serving import PIE, environment

NEWEST_FIRST = Path(__file__).parents[2] / "examples" / "policies" / "newest_first.py"
DESK = Desk("http://127.0.0.1:1", "")


def pie(folder: Path, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PIE, *arguments],
        cwd=folder,
        env=environment(folder, settings),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_policy_check_says_that_a_file_is_good(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text(
        "worker: {retention: adaptive, rules: [{action: ttl, after: 1d}]}"
    )
    done = pie(tmp_path, "policy", "check", "p.yaml")
    assert done.returncode == 0
    assert done.stdout == "p.yaml: good; retention `adaptive`, 1 rule, routing `cost`\n"


def test_a_summary_names_every_kind_of_policy_that_a_file_names(tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    file.write_text(
        "cluster:\n  replication: {policy: replicate-hot, copies: 3}\n"
        "  migration: [prefetch, {policy: drain, share: 0.8}, {policy: expire, after: 2d}]\n"
    )
    assert summary(file, checked(file)) == (
        f"{file}: good; retention `lru`, 0 rules, routing `cost`, replication `replicate-hot`, "
        "migration `drain`, `expire`"
    )


def test_policy_check_tells_all_that_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text("worker:\n  retention: lruu\n  rules: [{action: tll}]\n")
    done = pie(tmp_path, "policy", "check", "p.yaml")
    assert done.returncode == 2
    first, second = done.stderr.splitlines()
    assert first.startswith("pie: p.yaml:2:14: worker.retention: there is no retention policy")
    assert second.startswith("pie: p.yaml:3:20: worker.rules[0].action: there is no action 'tll'")


def test_policy_check_warns_of_rules_that_no_page_is_meant_by(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text(
        f"prefixes: {{a: {{tokens: {[7] * 31}}}, b: {{tokens: {[7] * 32}}}, c: {{text: short}}}}\n"
        "worker:\n  rules:\n    - match: {tenant: acme}\n      action: pin\n"
        "    - match: {session: '?*', model: smollm2}\n      action: keep-session\n"
    )
    done = pie(tmp_path, "policy", "check", "p.yaml", PIE_MODEL__PAGE_TOKENS="32")
    assert done.returncode == 0
    assert done.stdout.startswith("p.yaml: good; ")
    prefix, tenant, model = done.stderr.splitlines()
    assert prefix == (
        "pie: warning: p.yaml:1:16: prefixes.a.tokens: no page is meant: it is 31 tokens, and a page 32"
    )
    assert tenant == (
        "pie: warning: p.yaml:4:15: worker.rules[0].match.tenant: no page is meant: a tag is 16 digits of "
        "0-9 and a-f, as `pie explain` shows it, and none is like 'acme'"
    )
    assert model.startswith(
        "pie: warning: p.yaml:6:30: worker.rules[1].match.model: no page is meant"
    )


def test_what_could_hurt_is_refused_with_one_line(tmp_path: Path) -> None:
    bomb = "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n"
    for text, said in (
        (bomb, "p.yaml:2:8: aliases (`*name`) are not allowed in a policy file"),
        ("# " + "x" * 10_000_000, "p.yaml: is larger than 1 MiB"),
    ):
        (tmp_path / "p.yaml").write_text(text)
        done = pie(tmp_path, "policy", "check", "p.yaml")
        assert (done.returncode, done.stderr) == (2, f"pie: {said}\n")


SHOWN = [
    "  retention   lru",
    "  routing     cost",
    "  replication fixed",
    "  migration   prefetch, requests: 2",
    "  migration   drain",
    "  migration   spill-to-pool",
    "  scale       fixed",
    "  rule 0      ttl, after: 1d; tier is disk",
]
TO_SHOW = (
    "worker: {rules: [{match: {tier: disk}, action: ttl, after: 1d}]}\n"
    "cluster: {migration: [{policy: prefetch, requests: 2}]}"
)


@pytest.mark.parametrize("is_named", [False, True])
def test_policy_show_says_all_that_a_file_puts_in_force(
    is_named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.yaml").write_text(TO_SHOW)
    if not is_named:
        monkeypatch.setenv("PIE_POLICIES__FILE", "p.yaml")
    done = CliRunner().invoke(app, ["policy", "show", *(["p.yaml"] if is_named else [])])
    assert done.stdout.splitlines() == ["from p.yaml", *SHOWN]


class Router:
    """Stands for a router: what it answers, and what it was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, text: str | None = None) -> None:
        self.report = PolicyReport(3, [PolicyVersionLine(3, 0.0, "mine.yaml", 9)], [], None)
        self.own: str | None = None
        self.text = text
        self.texts: dict[str, str | None] = {}
        """Those of some versions, by their path."""
        self.put: list[str] = []
        self.refuses: list[str] = []
        self.warns: list[str] = []
        self.answers_again = True
        """Whether it still answers once it has put a text in force."""
        self.reported = 0
        monkeypatch.setattr(Desk, "_ask", self.ask)

    def ask(
        self,
        method: str,
        kind: type[object],
        *,
        below: str = "",
        body: bytes | None = None,
        timeout_s: float = 0.0,
    ) -> object:
        if body is not None:
            self.put.append(msgspec.json.decode(body)["note"])
        answer = self.answer(method, below)
        assert type(answer) is kind
        return answer

    def answer(self, method: str, below: str) -> object:
        if method == "POST":
            if self.refuses:
                raise ConfigError(self.refuses)
            return Applied(3, self.warns)
        if not below:
            self.reported += 1
            if not self.answers_again:
                raise UnansweredError("it was asked and has not answered")
            return self.report
        if below in self.texts:
            return PolicyText(3, self.texts[below])
        is_own = below == "/versions/0"
        return PolicyText(3, self.own if is_own else self.text)


def asked(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["policy", *arguments, "--at", "http://127.0.0.1:1"])


def test_policy_show_at_a_router_says_what_is_in_force_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    router = Router(monkeypatch, TO_SHOW)
    first, *lines = asked("show").stdout.splitlines()
    assert first == "in force at http://127.0.0.1:1: version 3, mine.yaml"
    assert lines == SHOWN
    router.report = PolicyReport(0, [], [], None)
    lines = asked("show").stdout.splitlines()
    assert "version 0, nothing was applied: what the router's configuration names" in lines[0]
    assert lines[1:3] == ["  no policy file: built-ins", "  retention   lru"]
    router.own = "worker: {retention: lfu}"
    assert asked("show").stdout.splitlines()[1] == "  retention   lfu"
    router.report = PolicyReport(3, [], [], None, "it differs")
    assert asked("show", "--in-force").stdout.splitlines()[1:] == ["it differs", *SHOWN]


def test_the_text_of_a_version_is_printed_as_it_was_applied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    router = Router(monkeypatch, "# mine\nworker: {retention: lfu}\n")
    assert asked("show", "--version", "3").stdout == "# mine\nworker: {retention: lfu}\n"
    router.text = None
    done = asked("show", "--version", "3")
    said = "pie: version 3 has no text: it is what each place's own file says\n"
    assert (done.exit_code, done.stderr) == (2, said)
    assert "leave one out" in asked("show", "--version", "3", "--in-force").stderr
    assert "leave one out" in asked("show", "p.yaml", "--in-force").stderr


def test_what_is_in_force_with_a_module_from_elsewhere_is_shown_as_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = "worker:\n  retention: 'not_here:Mine'"
    Router(monkeypatch, text)
    lines = asked("show").stdout.splitlines()
    assert "there is no module 'not_here'" in lines[2]
    assert lines[3:] == text.splitlines()


def test_a_file_and_a_router_are_not_both_shown() -> None:
    done = asked("show", "p.yaml")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "leave one out" in done.stderr


@pytest.mark.parametrize("command", ["apply", "check", "diff"])
def test_what_a_router_says_of_a_file_is_told_with_the_files_name(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(NEWEST_FIRST, tmp_path / "beside.py")
    (tmp_path / "p.yaml").write_text("worker:\n  retention: beside:NewestFirst\n")
    router = Router(monkeypatch)
    router.warns = ["3:15: worker.rules[0].match.tenant: no page is meant"]
    done = asked(command, "p.yaml")
    assert done.exit_code == 0
    (warning,) = done.stderr.splitlines()
    assert warning.startswith("pie: warning: p.yaml:3:15: worker.rules[0].match.tenant: ")
    router.refuses = ["2:14: worker.retention: there is no module 'beside' in /etc/pie", "is empty"]
    done = asked(command, "p.yaml")
    assert (done.exit_code, done.stdout) == (2, "")
    there = " (at the router, http://127.0.0.1:1)"
    assert done.stderr.splitlines() == [
        f"pie: p.yaml:2:14: worker.retention: there is no module 'beside' in /etc/pie{there}",
        f"pie: p.yaml: is empty{there}",
    ]


def test_a_rollback_goes_to_what_says_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    router = Router(monkeypatch, "worker: {retention: lfu}")
    lines = [PolicyVersionLine(number, 0.0, "mine.yaml", 9) for number in (1, 2, 3)]
    router.report = PolicyReport(3, lines, [], None)
    router.texts["/versions/1"] = "worker: {retention: lru}"
    asked("rollback")
    router.texts.clear()
    asked("rollback")
    assert router.put == ["rollback to 1", "rollback to 0"], "0 where all say the same"


COMMANDS = ("apply", "rollback")


def accept_and_close(server: socket.socket) -> None:
    server.accept()[0].close()


def put_in_force(command: str, folder: Path) -> Result:
    (folder / "p.yaml").write_text(TO_SHOW)
    return asked(command, *([str(folder / "p.yaml")] if command == "apply" else ["0"]))


@pytest.mark.parametrize("command", COMMANDS)
def test_who_is_overtaken_by_another_version_is_told_so_at_once(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = Router(monkeypatch)
    router.report = PolicyReport(
        4,
        [PolicyVersionLine(3, 0.0, "mine.yaml", 9), PolicyVersionLine(4, 0.0, "theirs.yaml", 9)],
        [PolicyPlaceLine("worker-0", 4, 0, ""), PolicyPlaceLine("worker-1", 2, 0, "")],
    )
    done = put_in_force(command, tmp_path)
    assert done.exit_code == 1
    assert done.stdout.splitlines() == [
        "version 3 is in force",
        "  version 4 (theirs.yaml) was applied meanwhile, and is in force in its place",
    ]
    assert router.reported == 1 + (command == "rollback")


def test_a_version_that_redis_has_lost_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pie.cluster.policy_edit._EVERYWHERE_S", 0.0)
    Router(monkeypatch).report = PolicyReport(2, [], [PolicyPlaceLine("worker-0", 2, 0, "")])
    done = put_in_force("apply", tmp_path)
    assert done.exit_code == 1
    assert done.stdout.splitlines() == [
        "version 3 is in force",
        "  it is in force no longer, for Redis has lost it: version 2 is; apply it again",
    ]


def test_where_nobody_says_which_places_run_a_version_that_is_in_force_the_exit_code_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pie.cluster.policy_edit._EVERYWHERE_S", 0.0)
    Router(monkeypatch).answers_again = False
    done = put_in_force("apply", tmp_path)
    assert (done.exit_code, done.stderr) == (1, "")
    assert done.stdout.splitlines() == [
        "version 3 is in force",
        "  which places run it is not known: it was asked and has not answered; `pie policy history` says",
    ]


@pytest.mark.parametrize("breaks_off", [True, False])
@pytest.mark.parametrize(("command", "code"), [("apply", 1), ("check", 2)])
def test_a_router_that_was_asked_and_does_not_answer_may_have_done_it(
    command: str,
    code: int,
    breaks_off: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "p.yaml").write_text(TO_SHOW)
    limit_s = 10.0 if breaks_off else 0.1

    def ask(method: str, url: str, path: str, **said: Any) -> Answer:
        return ask_router(method, url, path, **{**said, "timeout_s": limit_s})

    monkeypatch.setattr("pie.cluster.policy_edit.ask_router", ask)
    with socket.create_server(("127.0.0.1", 0)) as server:
        if breaks_off:
            threading.Thread(target=accept_and_close, args=(server,), daemon=True).start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        done = CliRunner().invoke(app, ["policy", command, str(tmp_path / "p.yaml"), "--at", url])
    assert (done.exit_code, done.stdout) == (code, "")
    (said,) = done.stderr.splitlines()
    assert said.startswith(f"pie: {url} was asked and has not answered (")
    assert said.endswith("is not known: `pie policy history` says") is (command == "apply")


def test_a_watched_file_is_warned_of_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "p.yaml"
    file.write_text("worker:\n  rules: [{match: {tenant: acme}, action: pin}]\n")
    Router(monkeypatch).warns = ["2:19: no page is meant", "2:19: nobody is acme"]
    said: list[str] = []
    next(watch_file(DESK, file, said.append))
    assert said[1:] == [
        f"warning: {file}:2:19: no page is meant",
        f"warning: {file}:2:19: nobody is acme",
    ]


@pytest.mark.parametrize("command", ["apply", "check", "diff", "show"])
def test_a_module_that_is_missing_here_is_told_with_the_folder(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.yaml").write_text("worker:\n  retention: nowhere:X\n")
    done = CliRunner().invoke(app, ["policy", command, "p.yaml"])
    assert done.exit_code == 2
    assert done.stderr == (
        "pie: p.yaml:2:14: worker.retention: there is no module 'nowhere' in "
        f"{tmp_path} or on Python's path\n"
    )


def test_a_module_is_looked_for_beside_no_file_where_a_place_has_none() -> None:
    said = "no module 'nowhere' on Python's path, and no policy file is configured that it could"
    with pytest.raises(PolicyFileError, match=said):
        PolicyVersions(PolicySet()).read(3, "worker: {retention: nowhere:X}")


def test_a_bad_file_is_not_applied_and_nobody_is_asked(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text("worker: {retention: lruu}\nclustr: {}")
    done = pie(tmp_path, "policy", "apply", "p.yaml", "--at", "http://127.0.0.1:9")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 2


def test_where_no_router_answers_one_sentence_says_so(tmp_path: Path) -> None:
    done = pie(tmp_path, "policy", "history", "--at", "http://127.0.0.1:9")
    assert done.returncode == 2
    assert "no router answers at http://127.0.0.1:9" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_what_is_applied_is_what_was_checked_also_where_it_can_be_read_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str | None] = []

    def apply(
        _: Desk, text: str | None, note: str, *, name: str = "", check: bool = False
    ) -> Applied:
        assert note
        assert name.startswith("/dev/fd/")
        asked.append(text)
        return Applied(0 if check else 3)

    monkeypatch.setattr(Desk, "apply", apply)
    monkeypatch.setattr(Desk, "report", lambda *_: PolicyReport(0, [], [], None))
    monkeypatch.setattr(Desk, "text", lambda _, version: None)
    text = "worker: {retention: lfu}\n"
    for command, at in (("apply", True), ("check", True), ("diff", True), ("check", False)):
        end, other = os.pipe()
        with os.fdopen(end), os.fdopen(other, "w") as writer:
            writer.write(text)
            writer.close()
            there = ["--at", DESK.url] if at else []
            done = CliRunner().invoke(app, ["policy", command, f"/dev/fd/{end}", *there])
            assert (done.exit_code, done.stderr) == (0, "")
    assert asked == [text] * 3


@pytest.mark.parametrize(
    ("event", "told"),
    [
        (
            PolicyEventLine(0.0, "by-load", "hint", "", 0, "it is busy", model="m", workers=4),
            "by-load hint  m to 4 workers: it is busy",
        ),
        (
            PolicyEventLine(0.0, "spill", "done", "", 0, "stored", place="w", pages=1),
            "spill done  w, 1 page: stored",
        ),
        (
            PolicyEventLine(0.0, "by-load", "lapse", "", 0, "no hint holds", model="m"),
            "by-load lapse  m: no hint holds",
        ),
    ],
)
def test_an_event_is_a_line(
    monkeypatch: pytest.MonkeyPatch, event: PolicyEventLine, told: str
) -> None:
    monkeypatch.setattr(Desk, "events", lambda _: PolicyEvents([event]))
    assert events(DESK) == f"1970-01-01 00:00:00 UTC  {told}"


def test_a_place_that_starts_again_runs_what_the_file_said_at_first(tmp_path: Path) -> None:
    file = tmp_path / "policies.yaml"
    file.write_text("worker: {retention: lfu}")
    said = read(file)
    file.write_text("worker: {retention: [oops")
    assert said.load().retention.name == "lfu"
    file.unlink()
    assert said.load().retention.name == "lfu"
    assert read(None).load().text is None


def test_policy_schema_is_json(tmp_path: Path) -> None:
    schema = json.loads(pie(tmp_path, "policy", "schema").stdout)
    assert set(schema["properties"]) == {"worker", "cluster", "prefixes"}
