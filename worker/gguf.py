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
from gguf import GGUFReader
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from pie.worker.errors import ModelError, NotEnoughMemory, UnsupportedModel
from pie.worker.fingerprint import file_hash
from pie.worker.manifest import damage, write_manifest

log = logging.getLogger("pie.worker.gguf")

CONVERSION_VERSION = 1
"""Goes into the fingerprint of every converted model: raise it when the conversion's output
changes, and old pages are not read again."""

_LOCK_WAIT_S = 1800.0
_LOCK_POLL_S = 0.2
_SMALL_FILES_BYTES = 32 << 20
"""What tokenizer, template and configuration may take beside the weights."""


def convert(file: Path, *, name: str, cache_folder: Path, progress: Callable[[str], None]) -> Path:
    """Return the Hugging Face folder made from a GGUF file, making it where it is not there.

    The folder appears whole or not at all, and is named by the file's content and the version of
    the conversion. One that is no longer what was written is made anew. Weights are float32: what
    the file's quantised numbers stand for, exactly.

    Raises:
        UnsupportedModel: Transformers cannot read the file.
        NotEnoughMemory: It does not fit into memory.
        ModelError: Nothing can be written to `cache_folder`, or it has too little room; or another
            process has been converting the file for half an hour.
    """
    cache_folder = cache_folder.expanduser()
    digest = file_hash(file, cache_folder)
    folder = cache_folder / "models" / f"{name}-{digest.hex()[:16]}-v{CONVERSION_VERSION}"
    what = f"the converted {name} cannot be written"
    if folder.is_dir():
        wrong = damage(folder, cache_folder)
        if wrong is None:
            return folder
        what = f"{folder} is damaged ({wrong}), remove that folder; it cannot be made anew"
    with _written(folder, what):
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder.with_name(f"{folder.name}.lock"), os.O_RDWR | os.O_CREAT, 0o644)
    with _locked(lock, folder, name, progress):
        if folder.is_dir():
            wrong = damage(folder, cache_folder)
            if wrong is None:
                return folder
            progress(f"Converting {name} again: {folder} is damaged ({wrong})")
            _remove(folder, wrong)
        else:
            progress(f"Converting {name}, once on this host (about half a minute for 100 MB)")
        started_s = time.monotonic()
        _remove_leftovers(folder)
        _make(file, folder, name)
        progress(f"Converted {name} in {time.monotonic() - started_s:.0f} s")
    return folder


def _make(file: Path, folder: Path, name: str) -> None:
    """Convert `file` into `folder`, which is not there yet; only under the lock."""
    needed = _room(file)
    free = shutil.disk_usage(folder.parent).free
    if needed > free:
        raise ModelError(
            f"the converted {name} takes {_mib(needed)} in {folder.parent}, and {_mib(free)} are "
            "free: make room there, or set model.cache_folder to a folder that has it"
        )
    what = f"the converted {name} cannot be written; it takes {_mib(needed)}"
    with _written(folder, what):
        scratch = Path(tempfile.mkdtemp(prefix=f"{folder.name}.tmp-", dir=folder.parent))
        try:
            _write(file, scratch)
            write_manifest(scratch)
            scratch.chmod(0o755)
            scratch.rename(folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def _written(folder: Path, what: str) -> Iterator[None]:
    """Say what to do where the cache takes nothing: it is full, read-only, or no folder."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ModelError(
            f"{what} ({folder.parent}: {reason}): make room there, or set model.cache_folder to "
            "another folder"
        ) from error


def _remove(folder: Path, wrong: str) -> None:
    """Remove a damaged folder at once for those who look, then its files."""
    try:
        doomed = Path(tempfile.mkdtemp(prefix=f"{folder.name}.tmp-", dir=folder.parent))
        folder.rename(doomed / "damaged")
    except OSError as error:
        raise ModelError(
            f"{folder} is damaged ({wrong}) and cannot be replaced ({error.strerror}): remove that "
            "folder, or set model.cache_folder to another one"
        ) from error
    shutil.rmtree(doomed, ignore_errors=True)


def _room(file: Path) -> int:
    """Return about how many bytes the conversion of a file takes; 0 where it cannot be read."""
    try:
        tensors = GGUFReader(file).tensors
    # What a broken file makes the reader raise has no end; transformers says what is wrong with it.
    except Exception:  # noqa: BLE001
        return 0
    return sum(int(one.n_elements) for one in tensors) * 4 + _SMALL_FILES_BYTES


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.0f} MiB"


def _write(file: Path, folder: Path) -> None:
    """Write `file` into `folder` in Hugging Face's arrangement."""
    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    try:
        loaded = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(**where)
    except MemoryError as error:
        raise NotEnoughMemory(f"{file} does not fit into memory") from error
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
def _locked(
    handle: int, folder: Path, name: str, progress: Callable[[str], None]
) -> Iterator[None]:
    """Hold a lock file, and close it; the system frees it when its holder dies."""
    deadline_s = time.monotonic() + _LOCK_WAIT_S
    told = False
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
                        f"stop it (it holds {folder}.lock) and start again"
                    ) from None
                time.sleep(_LOCK_POLL_S)
        yield
    finally:
        os.close(handle)
