"""How many CUDA devices there are.

Run as `python -m pie.worker.devices`, it prints the number, for processes that do not import torch.
Does not cover whether a model fits on one (`pie.worker.memory`).
"""

from __future__ import annotations

import sys

import torch


def main() -> None:
    """Print the number."""
    sys.stdout.write(f"{torch.cuda.device_count()}\n")


if __name__ == "__main__":
    main()
