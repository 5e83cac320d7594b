"""A process that stores pages on disk until it is killed: `python storing_process.py FOLDER FIRST`.

Writes the number of each page as soon as it can be read.
"""

import random
import sys
from pathlib import Path

from pie.pool.conformance import put, sample_page
from pie.pool.disk import DiskTier
from pie.pool.settings import Durability
from pie.pool.tier import id_of
from tests.pool.disk_places import LARGE, SMALL


def main() -> None:
    folder, first = Path(sys.argv[1]), int(sys.argv[2])
    tier = DiskTier([folder], 8 << 20, durability=Durability.NONE)
    tier.open(lock_timeout_s=60)
    held = list(tier.pages())
    chance = random.Random(first)
    for number in range(first, first + 100_000):
        header, payload = sample_page(number, (SMALL, LARGE)[number % 2])
        while not put(tier, header, payload):
            tier.remove(id_of(held.pop(chance.randrange(len(held) - 20))))
        held.append(header)
        sys.stdout.write(f"{number}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
