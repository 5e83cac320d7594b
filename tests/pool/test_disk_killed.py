"""A process that is killed while it stores leaves whole pages on disk and nothing else."""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pie.pool.conformance import read, sample_key, sample_page
from pie.pool.disk import DiskTier
from pie.pool.tier import id_of
from tests.pool.disk_places import LARGE, SMALL, disk_usage, files_below

pytestmark = pytest.mark.live

ROOT = Path(__file__).parents[2]
ROUNDS = 8


def test_whole_pages_survive_and_no_part_of_one_can_be_read(tmp_path: Path) -> None:
    chance = random.Random(1)
    first = 0
    for _ in range(ROUNDS):
        printed = _store_until_killed(tmp_path, first, 0.05 + chance.random() / 4)
        assert printed, "it was killed before it began"
        tier = DiskTier([tmp_path], 8 << 20)
        tier.open(lock_timeout_s=60)
        numbers = {sample_key(n): n for n in range(printed[-1] + 2)}
        held = {numbers[header.key] for header in tier.pages()}
        # What was complete is there, unless it had to leave for others; the last ones had not.
        assert held >= set(printed[-10:]) - set(printed[:-10])
        for number in held:
            header, payload = sample_page(number, (SMALL, LARGE)[number % 2])
            assert read(tier, id_of(header)) == payload
        assert tier.bad_by_reason.keys() <= {"torn_pack"}
        assert not [path for path in files_below(tmp_path) if path.parent.name == "tmp"]
        assert disk_usage(tmp_path) <= tier.used_bytes <= 8 << 20
        tier.check()
        tier.close()
        first = printed[-1] + 2


def _store_until_killed(folder: Path, first: int, after_s: float) -> list[int]:
    """Return the pages that the process said were readable."""
    command = [sys.executable, str(Path(__file__).with_name("storing_process.py"))]
    process = subprocess.Popen(
        [*command, str(folder), str(first)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
    )
    assert process.stdout is not None
    begun = process.stdout.readline()
    time.sleep(after_s)
    process.kill()
    rest, _ = process.communicate()
    # The last line may have been cut off, too.
    lines = (begun + rest).decode().rpartition("\n")[0].split()
    return [int(line) for line in lines]
