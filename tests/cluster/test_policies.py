"""Policies at work on a live cluster, seen through the API alone."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from openai import OpenAI

from pie.cluster.errors import ConfigError
from pie.cluster.policy_command import checked
from pie.cluster.policy_edit import (
    Desk,
    apply_file,
    difference,
    history,
    in_force,
    roll_back,
    warnings,
)
from tests.support.serving import Serving

pytestmark = [pytest.mark.live, pytest.mark.xdist_group("command"), pytest.mark.timeout(400)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "policies" / "newest_first.py"
PAGE_TOKENS = 16
SESSION = "adas-conversation"
SYSTEM = "You keep the log of a lighthouse. " * 12
POLICIES = f"""
prefixes:
  keeper: {{system: "{SYSTEM}"}}
worker:
  rules:
    - match: {{prefix: keeper}}
      action: persist-prefix
    - match: {{session: "?*"}}
      action: keep-session
      keep: 10m
      max: 16MiB
"""


def mount(folder: Path, name: str, text: str) -> None:
    """Bring a file's content there as a ConfigMap's: a link is turned to another folder."""
    (folder / name).mkdir()
    (folder / name / "policies.yaml").write_text(text)
    (folder / "..turned").symlink_to(name)
    (folder / "..turned").rename(folder / "..data")


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """One worker with room for 91 pages and nothing below."""
    folder = tmp_path_factory.mktemp("policies")
    mount(folder, "first", POLICIES)
    (folder / "policies.yaml").symlink_to("..data/policies.yaml")
    small = {
        "PIE_CLUSTER__WORKERS": "1",
        "PIE_POOL__NODES": "0",
        "PIE_MODEL__DEVICE_KV_BUDGET": "32MiB",
        "PIE_MODEL__HOST_KV_BUDGET": "0",
        "PIE_POLICIES__FILE": "policies.yaml",
        "PIE_POLICIES__WATCH": "true",
    }
    serving = Serving(folder, small)
    try:
        serving.wait_until_said("Ctrl-C stops it")
        serving.wait_until_ready()
        yield serving
    finally:
        serving.stop()


@pytest.fixture
def client(serving: Serving) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{serving.url}/v1", api_key="none", max_retries=0, timeout=60) as one:
        yield one


def found(client: OpenAI, text: str, **fields: object) -> tuple[int, int]:
    """Ask, and return how many of the prompt's tokens were not computed, and how many it has."""
    answer = client.completions.create(
        model="smollm2", prompt=text, max_tokens=1, extra_body=fields
    )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    return answer.usage.prompt_tokens_details.cached_tokens or 0, answer.usage.prompt_tokens


def press(client: OpenAI, name: str) -> None:
    """Compute twice as many pages of others as there is room for."""
    for number in range(8):
        found(client, pressed(name, number))


def pressed(name: str, number: int) -> str:
    return f"{name} {number}: " + "the tide comes in and goes out again. " * 36


def told(client: OpenAI, text: str) -> int:
    """Ask below the system message, and return how many tokens were not computed."""
    answer = client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}],
        max_tokens=1,
    )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    return answer.usage.prompt_tokens_details.cached_tokens or 0


def test_a_kept_conversation_is_warm_after_others_have_filled_the_memory(
    serving: Serving, client: OpenAI
) -> None:
    kept, other = ("In the harbour of " + place + " boats lie. " * 50 for place in ("A", "B"))
    found(client, kept, session_id=SESSION, cache_salt="me")
    found(client, other)
    press(client, "first")
    cached, tokens = found(client, kept, session_id=SESSION, cache_salt="me")
    assert cached >= tokens - 2 * PAGE_TOKENS
    assert found(client, other)[0] == 0
    assert SESSION not in serving.text + serving.logs()


def test_a_system_message_that_the_file_names_outstays_others(client: OpenAI) -> None:
    assert told(client, "Which ships passed?") == 0
    press(client, "second")
    assert told(client, "Who lit the lamp?") >= 5 * PAGE_TOKENS


def test_an_edit_takes_effect_everywhere_under_load_without_a_failed_request(
    serving: Serving, client: OpenAI
) -> None:
    desk, said = Desk(serving.url, ""), list[str]()
    edited = serving.folder / "edited.yaml"
    edited.write_text("worker: {retention: lru}\ncluster: {routing: round-robin}")
    assert "-  rule 1      keep-session" in difference(desk, edited).text
    over, failures = threading.Event(), list[BaseException]()
    asked: list[tuple[int, int]] = []

    def ask_on(number: int) -> None:
        try:
            while not over.is_set():
                asked.append(found(client, f"{number} {len(asked)} " + "waves roll in. " * 30))
        except BaseException as error:  # noqa: BLE001 - it is told by the test
            failures.append(error)

    threads = [threading.Thread(target=ask_on, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    try:
        wait_for(lambda: len(asked) >= 3)
        assert apply_file(desk, edited, said.append), said
        press(client, "under the edited policies")
        report = desk.report()
        assert {one.version for one in report.places} == {1}
        assert len(report.places) == 2, "one worker and one router"
        edited.write_text("worker: {retention: lfuu}\ncluster: 7")
        with pytest.raises(ConfigError) as caught:
            apply_file(desk, edited, said.append)
        assert len(caught.value.problems) == 2
        assert desk.report().version == 1, "a bad file changes nothing"
        assert roll_back(desk, None, said.append), said
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert not failures
    assert "* " in history(desk).splitlines()[1]
    assert told(client, "Who lit the lamp?") == 0, "its pages had to go under the edited policy"
    press(client, "third")
    assert told(client, "Who lit it again?") >= 5 * PAGE_TOKENS, "the file's rules are back"


def test_an_edit_of_the_watched_file_takes_effect_and_a_bad_one_is_told(
    serving: Serving, client: OpenAI
) -> None:
    desk = Desk(serving.url, "")
    before = desk.report().version

    def runs(version: int) -> bool:
        places = desk.report().places
        return len(places) == 2 and {one.version for one in places} == {version}

    def refused() -> str:
        return str(httpx.get(f"{serving.url}/status", timeout=30).json()["policy_edit_refused"])

    mount(serving.folder, "second", POLICIES.replace("10m", "11m"))
    wait_for(lambda: runs(before + 1))
    assert desk.report().versions[-1].note == "policies.yaml"
    assert not refused()
    mount(serving.folder, "third", "worker: {retention: lruu}\ncluster: 7")
    wait_for(lambda: "there is no retention policy 'lruu'" in refused())
    assert "policies.yaml:1:21: worker.retention: there is no" in refused()
    assert refused().endswith("(and 1 more)")
    wait_for(lambda: "an edit of" in serving.text)
    report = desk.report()
    assert report.version == before + 1
    assert report.refused is not None
    assert len(report.refused.problems) == 2
    assert "the edit of policies.yaml is refused" in history(desk)
    found(client, "It answers all the same.")
    mount(serving.folder, "fourth", POLICIES)
    wait_for(lambda: runs(before + 2) and not refused())


def test_a_module_that_only_the_router_lacks_is_told_with_where_it_looked(
    serving: Serving, tmp_path: Path
) -> None:
    desk, file = Desk(serving.url, ""), tmp_path / "mine.yaml"
    before = in_force(desk)
    assert before.startswith(f"in force at {serving.url}: version ")
    assert "  rule 1      keep-session, keep: 10m, max: 16MiB" in before
    assert "  migration   spill-to-pool" in before
    shutil.copy(EXAMPLE, tmp_path / "only_here.py")
    file.write_text("worker:\n  retention: only_here:NewestFirst\n")
    for ask in (
        lambda: apply_file(desk, file, print),
        lambda: difference(desk, file),
        lambda: warnings(desk, file, checked(file)),
    ):
        with pytest.raises(ConfigError) as caught:
            ask()
        assert str(caught.value) == (
            f"{file}:2:14: worker.retention: there is no module 'only_here' in {serving.folder} "
            f"or on Python's path (at the router, {serving.url})"
        )
    assert in_force(desk) == before


def test_a_policy_of_ones_own_evicts_by_its_own_rule(serving: Serving, client: OpenAI) -> None:
    desk, said = Desk(serving.url, ""), list[str]()
    shutil.copy(EXAMPLE, serving.folder / EXAMPLE.name)
    usual, own = serving.folder / "usual.yaml", serving.folder / "own.yaml"
    usual.write_text("worker: {retention: lru}")
    own.write_text("worker: {retention: 'newest_first:NewestFirst'}")

    def kept_by(file: Path, name: str) -> bool:
        """Say whether what was there first is still there after as much again as there is room for."""
        assert apply_file(desk, usual, said.append), said
        press(client, name)
        assert apply_file(desk, file, said.append), said
        press(client, f"{name}, more,")
        cached, tokens = found(client, pressed(name, 5))
        return cached >= tokens - 2 * PAGE_TOKENS

    # It has a millisecond to answer, or `lru` does: on a machine that is busy, now and then.
    deadline_s, tried = time.monotonic() + 120, 0
    while not kept_by(own, f"own {tried}"):
        assert time.monotonic() < deadline_s, "its rule is never followed"
        tried += 1
    assert not kept_by(usual, "usual"), "it is the rule that keeps it"


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
