"""GGUF files, converted once per host.

Covers making a Hugging Face folder (safetensors, tokenizer, chat template) from a GGUF file, under
a lock that all processes of a host share. Does not cover where the file comes from
(`pie.worker.sources`). Transformers reads a GGUF file in about 30 s for each 100 MB, too slow for
every start of every worker.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from pie.worker.errors import ModelError, UnsupportedModel
from pie.worker.fingerprint import file_hash

log = logging.getLogger("pie.worker.gguf")

CONVERSION_VERSION = 1
"""Goes into the fingerprint of every converted model: raise it when the conversion's output
changes, and old pages are not read again."""

_LOCK_WAIT_S = 1800.0
_LOCK_POLL_S = 0.2


def convert(file: Path, *, name: str, cache_folder: Path, progress: Callable[[str], None]) -> Path:
    """Return the Hugging Face folder made from a GGUF file, making it where it is not there.

    The folder appears whole or not at all, and is named by the file's content and the version of
    the conversion. Weights are float32: what the file's quantised numbers stand for, exactly.

    Raises:
        UnsupportedModel: Transformers cannot read the file.
        ModelError: Another process has been converting it for half an hour.
    """
    cache_folder = cache_folder.expanduser()
    digest = file_hash(file, cache_folder)
    folder = cache_folder / "models" / f"{name}-{digest.hex()[:16]}-v{CONVERSION_VERSION}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_name(f"{folder.name}.lock"), name, progress):
        if folder.is_dir():
            return folder
        progress(f"Converting {name}, once on this host (about half a minute for 100 MB)")
        started_s = time.monotonic()
        _remove_leftovers(folder)
        scratch = Path(tempfile.mkdtemp(prefix=f"{folder.name}.tmp-", dir=folder.parent))
        try:
            _write(file, scratch)
            scratch.chmod(0o755)
            scratch.rename(folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        progress(f"Converted {name} in {time.monotonic() - started_s:.0f} s")
    return folder


def _write(file: Path, folder: Path) -> None:
    """Write `file` into `folder` in Hugging Face's arrangement."""
    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    try:
        loaded = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(**where)
    # What a foreign or broken file makes transformers and gguf raise has no end.
    except Exception as error:
        raise UnsupportedModel(f"transformers cannot read {file}: {error}") from error
    # `save_pretrained` raises on a model that came from a GGUF file, so its weights move into a
    # fresh one; made on `meta`, that costs no memory.
    config = loaded.config
    for name in ("quantization_config", "_model_name_or_path"):
        if hasattr(config, name):
            delattr(config, name)
    with torch.device("meta"):
        fresh = type(loaded)(config)
    fresh.load_state_dict(loaded.state_dict(), assign=True)
    fresh.tie_weights()
    ends = {tokenizer.eos_token_id, config.eos_token_id} - {None}
    fresh.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        eos_token_id=sorted(ends), bos_token_id=tokenizer.bos_token_id
    )
    fresh.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _remove_leftovers(folder: Path) -> None:
    """Remove what a killed process left; only under the lock."""
    for scratch in folder.parent.glob(f"{folder.name}.tmp-*"):
        log.info("removing %s, left by a conversion that was killed", scratch)
        shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def _locked(path: Path, name: str, progress: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock file at `path`; the system frees it when its holder dies."""
    deadline_s = time.monotonic() + _LOCK_WAIT_S
    told = False
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not told:
                    progress(f"Waiting for another process that converts {name}")
                    told = True
                if time.monotonic() > deadline_s:
                    raise ModelError(
                        f"another process has been converting {name} for half an hour; "
                        f"stop it (it holds {path}) and start again"
                    ) from None
                time.sleep(_LOCK_POLL_S)
        yield
    finally:
        os.close(handle)
