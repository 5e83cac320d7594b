"""The `pie` command: what it says when it cannot, and that it leaves nothing behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from pie.index.lease import Lease
from tests.support.serving import LONG_S, PIE, Serving, environment

pytestmark = [pytest.mark.live, pytest.mark.xdist_group("command"), pytest.mark.timeout(300)]


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


def assert_sentence(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    sentence = done.stderr.strip().splitlines()[-1]
    assert sentence.startswith("pie: ")
    for word in words:
        assert word in sentence


def test_a_busy_port_is_one_sentence(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        done = pie(tmp_path, "serve", "--port", str(port))
    assert_sentence(done, f"127.0.0.1:{port}", "router.port")


def test_a_missing_model_is_one_sentence(tmp_path: Path) -> None:
    done = pie(tmp_path, "serve", "--model", str(tmp_path / "no-such-model"))
    assert_sentence(done, "no-such-model")


def test_too_little_memory_is_one_sentence(tmp_path: Path) -> None:
    done = pie(tmp_path, "serve", PIE_MODEL__DEVICE_KV_BUDGET="4000GiB")
    assert_sentence(done, "GiB", "model.device_kv_budget")


def test_every_mistake_in_the_configuration_is_reported(tmp_path: Path) -> None:
    (tmp_path / "pie.toml").write_text("[model]\ndtype = 'int3'\n[clutser]\n")
    done = pie(tmp_path, "serve")
    assert done.returncode == 2
    assert "pie.toml:2: model.dtype" in done.stderr
    assert "pie.toml:3: unknown section 'clutser'; did you mean cluster?" in done.stderr


def test_a_bad_policy_file_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "policies.yaml").write_text("worker:\n  retention: lruu\n")
    done = pie(tmp_path, "serve", PIE_POLICIES__FILE=str(tmp_path / "policies.yaml"))
    assert done.returncode == 2
    assert "lruu" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_ray_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    done = pie(tmp_path, "serve", PIE_CLUSTER__RAY_ADDRESS="127.0.0.1:1")
    assert_sentence(done, "127.0.0.1:1")


def test_a_second_cluster_with_the_same_index_is_one_sentence(
    tmp_path: Path, redis_url: str
) -> None:
    held = Lease(redis_url, "cluster", "somebody else")
    assert held.keep() is None
    try:
        done = pie(tmp_path, "serve", PIE_INDEX__URL=redis_url)
    finally:
        held.give_back()
    assert_sentence(done, "somebody else", "index.key_prefix")


def test_an_index_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    done = pie(tmp_path, "serve", PIE_INDEX__URL="redis://:hush@127.0.0.1:1/0")
    assert_sentence(done, "index")
    assert "hush" not in done.stderr


def test_status_without_a_cluster_is_one_sentence(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    done = pie(tmp_path, "status", "--at", f"http://127.0.0.1:{port}")
    assert_sentence(done, f"http://127.0.0.1:{port}", "pie serve")


def test_config_show_says_where_each_value_came_from(tmp_path: Path) -> None:
    (tmp_path / "pie.toml").write_text("[cluster]\nworkers = 3\n")
    done = pie(tmp_path, "config", "show", PIE_MODEL__DTYPE="float32")
    assert done.returncode == 0
    lines = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines() if line.strip()}
    assert lines["cluster.workers"] == ["3", "pie.toml:2"]
    assert lines["model.dtype"] == ['"float32"', "PIE_MODEL__DTYPE"]
    assert lines["model.page_tokens"] == ["16", "default"]


@pytest.mark.parametrize(
    ("words", "number"),
    [
        ("ray       starting", signal.SIGTERM),
        ("ray       starting", signal.SIGKILL),
        ("worker-0  ", signal.SIGTERM),
        ("worker-0  ", signal.SIGKILL),
    ],
)
def test_ended_at_any_moment_of_its_start_it_leaves_nothing_behind(
    tmp_path: Path, temporary: Path, number: int, words: str
) -> None:
    serving = Serving(tmp_path, {"PIE_CLUSTER__WORKERS": "1", "TMPDIR": str(temporary)})
    try:
        serving.wait_until_said(words)
        assert list(temporary.iterdir())
        family = psutil.Process(serving.process.pid).children(recursive=True)
    finally:
        code = serving.stop(number)
    assert code == (-signal.SIGKILL if number == signal.SIGKILL else 0), serving.text
    deadline_s = time.monotonic() + LONG_S
    while True:
        left = [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        if not left and not list(temporary.iterdir()):
            return
        assert time.monotonic() < deadline_s, f"left: {left} {list(temporary.rglob('*'))}"
        time.sleep(0.2)


def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    serving = Serving(tmp_path, {"PIE_CLUSTER__WORKERS": "1"})
    try:
        serving.wait_until_said("ray       ready")
        os.kill(serving.process.pid, signal.SIGTERM)
        serving.wait_until_said("once more")
    finally:
        serving.stop(signal.SIGTERM)
    assert serving.process.returncode in {0, 128 + signal.SIGTERM}
